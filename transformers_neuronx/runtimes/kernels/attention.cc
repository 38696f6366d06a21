// Attention over the cache, as `layers/attention.py` has it: the new keys and values are written, and of the cache only
// positions in use are read.
//
// A query is one head of one token. Those that share a head of keys are worked on together, softmax goes block by block
// of positions, and what came before becomes smaller when a larger score turns up (Milakov and Gimelshein,
// arXiv:1805.02867). A few queries have positions along the lanes of a vector; of many, each has a lane of its own.
#include "vectors.h"

namespace neuronx::NEURONX_LEVEL {
namespace {

constexpr int64_t kSize = 256;      // features of a head, at most
constexpr int64_t kPositions = 64;  // of a block
constexpr int64_t kQueries = 2 * kLanes;
constexpr int64_t kFew = kLanes / 2;  // queries, for which lanes of their own do not pay
constexpr int64_t kParts = kLanes == 16 ? 4 : 2;  // vectors of features that are summed at once
constexpr float kNone = -__builtin_inff();

typedef Floats Wide[kSize / kLanes];  // the features of a head

inline Floats Larger(Floats a, Floats b) { return (b > a) | (b != b) ? b : a; }

// The keys and values of one head of one row, and the queries that look at them.
template <typename Number>
struct Head {
  static constexpr bool kScaled = sizeof(Number) == 1;

  const AttentionArguments& a;
  const int64_t row, head, group;  // group: queries of a token
  int64_t first, length;           // position of the first token, and how many there are
  Number *keys, *values;
  float *key_scales, *value_scales;

  Head(const AttentionArguments& a, int64_t row, int64_t head) : a(a), row(row), head(head), group(a.heads / a.kv_heads) {
    const int64_t slot = a.slot ? a.slot[row] : row;
    first = a.start[row];
    length = a.length[row];
    if (length > a.positions - first) length = a.positions - first;
    if (length > a.tokens) length = a.tokens;
    if (first < 0 || slot < 0 || slot >= a.slots) length = 0;  // what is not in the cache is neither written nor read
    const int64_t at = length > 0 ? (slot * a.kv_heads + head) * a.positions : 0;
    keys = static_cast<Number*>(a.keys) + at * a.size;
    values = static_cast<Number*>(a.values) + at * a.size;
    key_scales = kScaled ? a.key_scales + at : nullptr;
    value_scales = kScaled ? a.value_scales + at : nullptr;
  }

  int64_t Queries() const { return a.tokens * group; }
  int64_t Own(int64_t query) const { return query / group < length ? first + query / group : -1; }  // -1: sees nothing
  int64_t Oldest(int64_t own) const { return a.window > 0 && own >= a.window ? own - a.window + 1 : 0; }
  float Slope(int64_t query) const { return a.slopes ? a.slopes[head * group + query % group] : 0; }

  int64_t At(int64_t query) const {  // where it stands among all queries, and its context among all
    return ((row * a.tokens + query / group) * a.heads + head * group + query % group) * a.size;
  }

  void Write() const {
    for (int64_t token = 0; token < length; ++token) {
      const int64_t from = ((row * a.tokens + token) * a.kv_heads + head) * a.size, to = first + token;
      Put(a.k, from, keys + to * a.size, kScaled ? key_scales + to : nullptr);
      Put(a.v, from, values + to * a.size, kScaled ? value_scales + to : nullptr);
    }
  }

  template <typename To>
  void Put(const void* x, int64_t from, To* to, float*) const {
    memcpy(to, static_cast<const To*>(x) + from, a.size * sizeof *to);
  }

  void Put(const void* x, int64_t from, int8_t* to, float* scale) const {
    float wide[kSize], largest = 0;
    Widen(x, a.type, from, a.size, wide);
    for (int64_t i = 0; i < a.size; ++i) {
      const float each = __builtin_fabsf(wide[i]);
      if (each > largest || each != each) largest = each;
    }
    *scale = largest * (1.0f / 127);
    const bool some = *scale > 0 && *scale < __builtin_inff();  // otherwise the scale alone says what the numbers are
    const float inverse = some ? 1 / *scale : 0;
    for (int64_t i = 0; i < a.size; ++i) to[i] = static_cast<int8_t>(some ? __builtin_rintf(wide[i] * inverse) : 0);
  }

  // The numbers of a position, and zeros behind them.
  Floats Part(const Number* numbers, int64_t part) const {
    const int64_t rest = a.size - part * kLanes;
    return rest >= kLanes ? Widened(numbers + part * kLanes) : rest > 0 ? Widened(numbers + part * kLanes, rest) : Floats{};
  }

  Floats Capped(Floats scores) const {  // cap * tanh(scores / cap)
    if (a.softcap <= 0) return scores;
    return a.softcap - 2 * a.softcap / (Exp(scores * (2 / a.softcap)) + 1);
  }

  void Finish(int64_t query, const float* context, float sum) const {
    float scaled[kSize];
    for (int64_t i = 0; i < a.size; ++i) scaled[i] = sum == 0 ? 0 : context[i] / sum;
    Narrow(scaled, a.type, a.size, a.context, At(query));
  }
};

// Positions along the lanes.
template <typename Number>
struct Query {
  const Head<Number>& head;
  const int64_t query, own, parts;
  Wide q = {}, context = {};
  float largest = kNone, sum = 0;

  Query(const Head<Number>& head, int64_t query)
      : head(head), query(query), own(head.Own(query)), parts(RoundUp(head.a.size, kLanes) / kLanes) {
    float wide[kSize] = {};
    Widen(head.a.q, head.a.type, head.At(query), head.a.size, wide);
    for (int64_t part = 0; part < parts; ++part) q[part] = Load<Floats>(wide + part * kLanes) * head.a.scale;
  }

  void Run() {
    for (int64_t first = head.Oldest(own); first <= own; first += kPositions)
      Add(first, own + 1 - first < kPositions ? own + 1 - first : kPositions);
    head.Finish(query, reinterpret_cast<const float*>(context), sum);
  }

  void Add(int64_t first, int64_t count) {
    Floats scores[kPositions / kLanes], most = Floats{} + largest, total = {};
    const int64_t vectors = RoundUp(count, kLanes) / kLanes;
    for (int64_t i = 0; i < vectors; ++i) {
      scores[i] = Scores(first + i * kLanes, count - i * kLanes);
      most = Larger(most, scores[i]);
    }
    const float before = largest;
    for (int lane = 0; lane < kLanes; ++lane) largest = most[lane] <= largest ? largest : most[lane];
    const Floats factor = Exp(Floats{} + (before - largest));
    for (int64_t i = 0; i < vectors; ++i) {
      scores[i] = Exp(scores[i] - largest);
      total += scores[i];
      if (head.kScaled) scores[i] *= LoadPart<Floats>(head.value_scales + first + i * kLanes, Some(count - i * kLanes));
    }
    sum = sum * factor[0] + Total(total);
    for (int64_t part = 0; part < parts; ++part) context[part] *= factor;
    for (int64_t part = 0; part < parts; part += kParts)
      AddValues(part, head.values + first * head.a.size, count, reinterpret_cast<const float*>(scores));
  }

  static int64_t Some(int64_t count) { return count < kLanes ? count : kLanes; }

  Floats Scores(int64_t position, int64_t count) const {
    Floats products[kLanes] = {};
    for (int64_t i = 0; i < Some(count); ++i) {
      const Number* key = head.keys + (position + i) * head.a.size;
      for (int64_t part = 0; part < parts; ++part) products[i] += q[part] * head.Part(key, part);
    }
    Floats scores = Totals(products);
    if (head.kScaled) scores *= LoadPart<Floats>(head.key_scales + position, Some(count));
    const Ints offset = Count();
    const Floats distance = __builtin_convertvector(static_cast<int32_t>(own - position) - offset, Floats);
    scores = head.Capped(scores) - head.Slope(query) * distance;
    return offset < static_cast<int32_t>(Some(count)) ? scores : Floats{} + kNone;
  }

  void AddValues(int64_t first, const Number* values, int64_t count, const float* weights) {
    Floats sums[kParts] = {};
    for (int64_t i = 0; i < count; ++i, values += head.a.size)
      UNROLL for (int64_t part = 0; part < kParts; ++part) sums[part] += weights[i] * head.Part(values, first + part);
    for (int64_t part = 0; part < kParts && first + part < parts; ++part) context[first + part] += sums[part];
  }
};

// Queries along the lanes, two vectors of them.
template <typename Number>
struct Queries {
  const Head<Number>& head;
  const int64_t first, count, parts;
  int64_t oldest, newest;  // positions that any of them sees
  Ints own[2], from[2];    // positions: each sees from .. own
  Floats slope[2], largest[2], sum[2] = {};
  Floats q[kSize][2];
  Floats weights[kPositions][2];
  Wide values[kPositions];
  Wide context[kQueries] = {};

  Queries(const Head<Number>& head, int64_t first)
      : head(head), first(first), count(head.Queries() - first < kQueries ? head.Queries() - first : kQueries),
        parts(RoundUp(head.a.size, kParts * kLanes) / kLanes), oldest(INT32_MAX), newest(-1) {
    memset(q, 0, sizeof q);
    for (int64_t i = 0; i < kQueries; ++i) {
      const int64_t mine = i < count ? head.Own(first + i) : -1;
      own[i / kLanes][i % kLanes] = static_cast<int32_t>(mine);
      from[i / kLanes][i % kLanes] = static_cast<int32_t>(head.Oldest(mine));
      slope[i / kLanes][i % kLanes] = i < count ? head.Slope(first + i) : 0;
      largest[i / kLanes][i % kLanes] = kNone;
      if (mine < 0) continue;
      oldest = head.Oldest(mine) < oldest ? head.Oldest(mine) : oldest;
      newest = mine > newest ? mine : newest;
      float wide[kSize];
      Widen(head.a.q, head.a.type, head.At(first + i), head.a.size, wide);
      for (int64_t j = 0; j < head.a.size; ++j) q[j][i / kLanes][i % kLanes] = wide[j] * head.a.scale;
    }
  }

  void Run() {
    for (int64_t position = oldest; position <= newest; position += kPositions)
      Add(position, newest + 1 - position < kPositions ? newest + 1 - position : kPositions);
    for (int64_t i = 0; i < count; ++i)
      head.Finish(first + i, reinterpret_cast<const float*>(context[i]), sum[i / kLanes][i % kLanes]);
  }

  void Add(int64_t position, int64_t positions) {
    for (int64_t i = 0; i < positions; i += 4) Scores(position, i, positions - i < 4 ? positions - i : 4);
    float factor[kQueries];
    for (int half = 0; half < 2; ++half) {
      Floats most = largest[half];
      for (int64_t i = 0; i < positions; ++i) most = Larger(most, weights[i][half]);
      const Floats zero = most == kNone ? Floats{} : most;  // of those that have seen nothing yet
      const Floats smaller = Exp(largest[half] - zero);
      largest[half] = most;
      sum[half] *= smaller;
      memcpy(factor + half * kLanes, &smaller, sizeof smaller);
      for (int64_t i = 0; i < positions; ++i) {
        weights[i][half] = Exp(weights[i][half] - zero);
        sum[half] += weights[i][half];
        if (head.kScaled) weights[i][half] *= head.value_scales[position + i];
      }
    }
    for (int64_t i = 0; i < positions; ++i)
      for (int64_t part = 0; part < parts; ++part)
        values[i][part] = head.Part(head.values + (position + i) * head.a.size, part);
    for (int64_t i = 0; i < count; i += 4)
      for (int64_t part = 0; part < parts; part += kParts) AddValues(i, part, positions, factor + i);
  }

  // Of up to four positions, and where they are not seen none.
  void Scores(int64_t position, int64_t at, int64_t some) {
    alignas(64) float keys[4][kSize];
    for (int64_t i = 0; i < 4; ++i)
      for (int64_t part = 0; part < parts; ++part) {
        const Number* key = head.keys + (position + at + (i < some ? i : 0)) * head.a.size;
        const Floats wide = head.Part(key, part);
        memcpy(keys[i] + part * kLanes, &wide, sizeof wide);
      }
    Floats sums[4][2] = {};
    for (int64_t j = 0; j < head.a.size; ++j)
      UNROLL for (int i = 0; i < 4; ++i)
        UNROLL for (int half = 0; half < 2; ++half) sums[i][half] += q[j][half] * keys[i][j];
    for (int64_t i = 0; i < some; ++i)
      for (int half = 0; half < 2; ++half) {
        const int32_t here = static_cast<int32_t>(position + at + i);
        const Floats scores = head.Capped(head.kScaled ? sums[i][half] * head.key_scales[here] : sums[i][half]);
        const Floats distance = __builtin_convertvector(own[half] - here, Floats);
        const Ints seen = (own[half] >= here) & (from[half] <= here);
        weights[at + i][half] = seen ? scores - slope[half] * distance : Floats{} + kNone;
      }
  }

  // To the contexts of four queries.
  void AddValues(int64_t query, int64_t part, int64_t positions, const float* factor) {
    Floats sums[4][kParts];
    UNROLL for (int i = 0; i < 4; ++i)
      UNROLL for (int j = 0; j < kParts; ++j) sums[i][j] = context[query + i][part + j] * factor[i];
    for (int64_t position = 0; position < positions; ++position) {
      const float* weight = reinterpret_cast<const float*>(weights[position]) + query;
      UNROLL for (int i = 0; i < 4; ++i)
        UNROLL for (int j = 0; j < kParts; ++j) sums[i][j] += weight[i] * values[position][part + j];
    }
    UNROLL for (int i = 0; i < 4; ++i)
      UNROLL for (int j = 0; j < kParts; ++j) context[query + i][part + j] = sums[i][j];
  }
};

template <typename Number>
struct Attention {
  const AttentionArguments& a;
  int64_t heads, blocks;  // of all rows; of queries of a head

  explicit Attention(const AttentionArguments& a) : a(a), heads(a.rows * a.kv_heads) {
    const int64_t queries = a.tokens * (a.heads / a.kv_heads);
    blocks = queries <= kFew ? 1 : RoundUp(queries, kQueries) / kQueries;
  }

  Head<Number> HeadOf(int64_t head) const { return Head<Number>(a, head / a.kv_heads, head % a.kv_heads); }

  void Attend(const Head<Number>& head, int64_t block) const {
    if (head.Queries() > kFew) return Queries<Number>(head, block * kQueries).Run();
    for (int64_t query = 0; query < head.Queries(); ++query) Query<Number>(head, query).Run();
  }

  void Run(const Pool& pool) const {
    const auto write = [](void* self, int64_t head) { static_cast<const Attention*>(self)->HeadOf(head).Write(); };
    const auto attend = [](void* self, int64_t piece) {
      const auto& attention = *static_cast<const Attention*>(self);
      const auto head = attention.HeadOf(piece / attention.blocks);
      if (attention.blocks == 1) head.Write();
      attention.Attend(head, piece % attention.blocks);
    };
    void* self = const_cast<Attention*>(this);
    if (blocks > 1) pool.run(pool.pool, heads, write, self);
    pool.run(pool.pool, heads * blocks, attend, self);
  }
};

}  // namespace

void Attend(const AttentionArguments& arguments, const Pool& pool) {
  switch (arguments.cached) {
    case Type::kF32: return Attention<float>(arguments).Run(pool);
    case Type::kBF16: return Attention<BFloat16>(arguments).Run(pool);
    case Type::kF16: return Attention<Float16>(arguments).Run(pool);
    case Type::kS8: return Attention<int8_t>(arguments).Run(pool);
    case Type::kS4: return;
  }
}

}  // namespace neuronx::NEURONX_LEVEL
