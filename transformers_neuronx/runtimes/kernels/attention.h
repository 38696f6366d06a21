// Queries that look at keys and values, wherever those lie: what attention over the cache and to a memory have in common.
//
// A query is one head of one token. Those that share a head of keys are worked on together, softmax goes block by block
// of positions, and what came before becomes smaller when a larger score turns up (Milakov and Gimelshein,
// arXiv:1805.02867). A few queries have positions along the lanes of a vector; of many, each has a lane of its own.
//
// A kernel has a `Head`, made of its arguments, a row and a head of keys. It says where these lie, which positions a
// query sees, and what becomes of products as scores:
//   Key(position), Value(position)     the numbers of a position; those of the next one stand Stride() further
//   NextKeys()                         what is looked at after this head
//   Own(query), Oldest(own)            the last position that a query sees, or -1, and the first one
//   Score(products, query, position, count, distance)  of a query, so many positions along the lanes from one on
//   Score(products, lanes, own, position)              of a position, queries along the lanes
//   Lanes(head, query, count)          what the latter wants to know of so many queries
//   Ask(lanes, position)               what that will want soon
//   kScaled, key_scales, value_scales  whether numbers of a position are multiplied by a scale, which is there then
//   kWrites, Write()                   whether keys and values are put there first
#pragma once

#include <type_traits>

#include "kinds.h"

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

// One head of keys and values of one row, and the queries that look at it.
template <typename Stored, typename Given>
struct HeadOf {
  using Number = Stored;
  using Arguments = Given;

  const Arguments& a;
  const int64_t row, head, group;  // group: queries of a token

  HeadOf(const Arguments& a, int64_t row, int64_t head) : a(a), row(row), head(head), group(a.heads / a.kv_heads) {}

  int64_t Queries() const { return a.tokens * group; }
  int64_t HeadOfQuery(int64_t query) const { return head * group + query % group; }

  int64_t At(int64_t query) const {  // where it stands among all queries, and its context among all
    return ((row * a.tokens + query / group) * a.heads + HeadOfQuery(query)) * a.size;
  }

  // The numbers of a position, and zeros behind them.
  Floats Part(const Number* numbers, int64_t part) const {
    const int64_t rest = a.size - part * kLanes;
    return rest > 0 ? Some(numbers + part * kLanes, rest) : Floats{};
  }

  // The numbers of a position will be wanted soon. Compilers leave out calls of a function that does no more than that.
  __attribute__((always_inline)) void Ask(const Number* numbers) const {
    const char* line = reinterpret_cast<const char*>(numbers);
    for (int64_t i = 0; i < a.size * static_cast<int64_t>(sizeof *numbers); i += 64) __builtin_prefetch(line + i, 0, 2);
  }

  void Finish(int64_t query, const float* context, float sum) const {
    float scaled[kSize];
    for (int64_t i = 0; i < a.size; ++i) scaled[i] = sum == 0 ? 0 : context[i] / sum;
    Narrow(scaled, a.type, a.size, a.context, At(query));
  }
};

// COUNT queries, with positions along the lanes. WHOLE: features fill vectors, kParts at a time.
template <typename Head, int COUNT, bool WHOLE>
struct Few {
  using Number = typename Head::Number;
  struct Scores { Floats of[kPositions / kLanes]; };

  const Head& head;
  const int64_t first, parts;  // query, vectors of features
  int64_t oldest = INT32_MAX, newest = -1;
  int64_t own[COUNT], from[COUNT];  // positions: each query sees from .. own
  Wide q[COUNT] = {}, context[COUNT] = {};
  float largest[COUNT], sum[COUNT] = {};

  Few(const Head& head, int64_t first)
      : head(head), first(first), parts(RoundUp(head.a.size, kLanes * kParts) / kLanes) {
    for (int i = 0; i < COUNT; ++i) {
      own[i] = head.Own(first + i);
      from[i] = head.Oldest(own[i]);
      largest[i] = kNone;
      oldest = Least(oldest, from[i]);
      newest = own[i] > newest ? own[i] : newest;
      Widen(head.a.q, head.a.type, head.At(first + i), head.a.size, reinterpret_cast<float*>(q[i]));
      for (Floats& part : q[i]) part *= head.a.scale;
    }
  }

  void Run() {
    for (int64_t position = oldest; position <= newest; position += kPositions)
      Add(position, Least(newest + 1 - position, kPositions));
    for (int i = 0; i < COUNT; ++i) head.Finish(first + i, reinterpret_cast<const float*>(context[i]), sum[i]);
  }

  Floats Part(const Number* numbers, int64_t part) const {
    if constexpr (WHOLE) return Widened(numbers + part * kLanes);
    return head.Part(numbers, part);
  }

  void Add(int64_t position, int64_t count) {
    Scores scores[COUNT];
    for (int64_t at = 0; at < count; at += kLanes) Score(position + at, Least(count - at, kLanes), at / kLanes, scores);
    for (int i = 0; i < COUNT; ++i) Weigh(i, position, count, scores[i]);
    for (int64_t part = 0; part < parts; part += kParts) AddValues(part, position, count, scores);
  }

  void Score(int64_t position, int64_t count, int64_t at, Scores (&scores)[COUNT]) const {
    Floats products[COUNT][kLanes] = {};
    const Number *key = head.Key(position), *value = head.Value(position);
    for (int64_t i = 0; i < count; ++i, key += head.Stride(), value += head.Stride()) {
      head.Ask(value);
      for (int64_t part = 0; part < parts; part += kParts)
        UNROLL for (int64_t j = 0; j < kParts; ++j) {
          const Floats some = Part(key, part + j);
          UNROLL for (int query = 0; query < COUNT; ++query) products[query][i] += q[query][part + j] * some;
        }
    }
    const Ints offset = Count();
    for (int query = 0; query < COUNT; ++query) {
      Floats all = Totals(products[query]);
      if constexpr (Head::kScaled) all *= Some(head.key_scales + position, count);
      const Ints distance = static_cast<int32_t>(own[query] - position) - offset;
      all = head.Score(all, first + query, position, count, distance);
      const Ints seen = (distance >= 0) & (distance <= static_cast<int32_t>(own[query] - from[query]));
      scores[query].of[at] = seen & (offset < static_cast<int32_t>(count)) ? all : Floats{} + kNone;
    }
  }

  // Scores become weights, and what was added before smaller if one is larger than all before.
  void Weigh(int query, int64_t position, int64_t count, Scores& scores) {
    Floats most = Floats{} + largest[query], total = {};
    for (int64_t i = 0; i * kLanes < count; ++i) most = Larger(most, scores.of[i]);
    const float before = largest[query];
    for (int lane = 0; lane < kLanes; ++lane) largest[query] = most[lane] <= largest[query] ? largest[query] : most[lane];
    const float zero = largest[query] == kNone ? 0 : largest[query];  // of one that has seen nothing yet
    const Floats factor = Exp(Floats{} + (before - zero));
    for (int64_t i = 0; i * kLanes < count; ++i) {
      scores.of[i] = Exp(scores.of[i] - zero);
      total += scores.of[i];
      if constexpr (Head::kScaled) scores.of[i] *= Some(head.value_scales + position + i * kLanes, count - i * kLanes);
    }
    sum[query] = sum[query] * factor[0] + Total(total);
    for (int64_t part = 0; part < parts; ++part) context[query][part] *= factor;
  }

  void AddValues(int64_t part, int64_t position, int64_t count, const Scores (&scores)[COUNT]) {
    Floats sums[COUNT][kParts] = {};
    const Number* value = head.Value(position);
    const bool last = position + kPositions > newest;
    const Number* next = last ? head.NextKeys() : head.Key(position + kPositions);
    for (int64_t i = 0; i < count; ++i, value += head.Stride(), next += head.Stride()) {
      head.Ask(next);
      UNROLL for (int64_t j = 0; j < kParts; ++j) {
        const Floats some = Part(value, part + j);
        UNROLL for (int query = 0; query < COUNT; ++query)
          sums[query][j] += reinterpret_cast<const float*>(scores[query].of)[i] * some;
      }
    }
    UNROLL for (int query = 0; query < COUNT; ++query)
      UNROLL for (int64_t j = 0; j < kParts; ++j) context[query][part + j] += sums[query][j];
  }
};

// Queries along the lanes, two vectors of them. Keys and values in bf16 are multiplied as they are, where that pays, and
// so are weights then: two positions of them make a word.
template <typename Head>
struct Many {
  using Number = typename Head::Number;
  using Kind = std::conditional_t<std::is_same<Number, BFloat16>::value && kPairsPay, BF16, F32>;
  static constexpr int kKeys = kLanes == 16 ? 8 : 4, kTogether = 4;  // positions, and queries, that are worked on at once

  const Head& head;
  const int64_t first, count, words, parts;  // query, how many; of a key, vectors of a value
  int64_t oldest = INT32_MAX, newest = -1;   // positions that any of them sees
  int64_t seen_first = 0, seen_last = INT32_MAX;  // and that all of them see
  Ints own[2], from[2];                      // positions: each sees from .. own
  Floats largest[2], sum[2] = {};
  const typename Head::Lanes lanes[2];
  alignas(64) int32_t q[kSize][kQueries];
  Floats weights[kPositions][2];             // and then words of them
  Floats values[kPositions * kSize / kLanes], context[kQueries * kSize / kLanes];  // [., parts]

  Many(const Head& head, int64_t first)
      : head(head), first(first), count(Least(head.Queries() - first, kQueries)),
        words(RoundUp(head.a.size, Kind::PER_PART) / Kind::PER_PART),
        parts(RoundUp(head.a.size, kParts * kLanes) / kLanes),
        lanes{{head, first, count}, {head, first + kLanes, count - kLanes}} {
    memset(q, 0, words * sizeof q[0]);
    memset(context, 0, kQueries * parts * sizeof context[0]);
    for (int64_t i = 0; i < kQueries; ++i) {
      const int64_t mine = i < count ? head.Own(first + i) : -1;
      own[i / kLanes][i % kLanes] = static_cast<int32_t>(mine);
      from[i / kLanes][i % kLanes] = static_cast<int32_t>(head.Oldest(mine));
      largest[i / kLanes][i % kLanes] = kNone;
      seen_first = head.Oldest(mine) > seen_first ? head.Oldest(mine) : seen_first;
      seen_last = Least(seen_last, mine);
      if (mine < 0) continue;
      oldest = Least(oldest, head.Oldest(mine));
      newest = mine > newest ? mine : newest;
      int32_t query[kSize] = {};
      ReadQuery(head.At(first + i), reinterpret_cast<typename Kind::Active*>(query));
      for (int64_t j = 0; j < words; ++j) q[j][i] = query[j];
    }
  }

  void ReadQuery(int64_t at, float* out) const { Widen(head.a.q, head.a.type, at, head.a.size, out); }
  void ReadQuery(int64_t at, BFloat16* out) const { Copy(static_cast<const BFloat16*>(head.a.q) + at, out); }
  void Copy(const BFloat16* from, BFloat16* to) const { memcpy(to, from, head.a.size * sizeof *to); }
  template <typename From>
  void Copy(const From* from, float* to) const { Widen(from, head.a.size, to); }

  void Run() {
    for (int64_t position = oldest; position <= newest; position += kPositions)
      Add(position, Least(newest + 1 - position, kPositions));
    for (int64_t i = 0; i < count; ++i)
      head.Finish(first + i, reinterpret_cast<const float*>(context + i * parts), sum[i / kLanes][i % kLanes]);
  }

  void Add(int64_t position, int64_t positions) {
    for (int64_t i = 0; i < positions; i += kKeys) Score(position, i, Least(positions - i, kKeys));
    float factor[kQueries];
    for (int half = 0; half < 2; ++half) {
      const Floats smaller = Weigh(half, position, positions);
      memcpy(factor + half * kLanes, &smaller, sizeof smaller);
    }
    const int64_t joined = RoundUp(positions, Kind::PER_PART) / Kind::PER_PART;
    for (int64_t i = 0; i < joined; ++i) {
      const int64_t at = i * Kind::PER_PART;
      for (int half = 0; half < 2; ++half)
        weights[i][half] = Joined(positions - at, [&](int64_t j) { return weights[at + j][half]; });
      for (int64_t part = 0; part < parts; ++part)
        values[i * parts + part] = Joined(positions - at, [&](int64_t j) {
          return head.Part(head.Value(position + at + j), part);
        });
    }
    for (int64_t i = 0; i < count; i += kTogether)
      for (int64_t part = 0; part < parts; part += kParts) AddValues(i, part, joined, factor + i);
  }

  // The words of up to PER_PART positions.
  template <typename Each>
  static Floats Joined(int64_t positions, const Each& each) {
    if constexpr (Kind::PER_PART == 1) return each(0);
    else return Cast<Floats>(Kind::Joined(each(0), positions > 1 ? each(1) : Floats{}));
  }

  // Of up to kKeys positions, and where they are not seen none.
  void Score(int64_t position, int64_t at, int64_t some) {
    for (int64_t i = 0; i < some; ++i) head.Ask(lanes, position + at + i);
    int32_t room[kKeys][kSize];
    const int32_t* keys[kKeys];
    for (int64_t i = 0; i < kKeys; ++i)
      keys[i] = Words(head.Key(position + at + Least(i, some - 1)), room[i]);
    Floats sums[kKeys][2] = {};
    for (int64_t j = 0; j < words; ++j) {
      const auto low = Kind::Read(reinterpret_cast<const char*>(q[j]));
      const auto high = Kind::Read(reinterpret_cast<const char*>(q[j] + kLanes));
      UNROLL for (int i = 0; i < kKeys; ++i) {
        auto same = Kind::Repeat(keys[i] + j);
        Keep(same);
        sums[i][0] = Kind::Add(sums[i][0], low, same);
        sums[i][1] = Kind::Add(sums[i][1], high, same);
      }
    }
    const bool all_seen = position + at + some - 1 <= seen_last && position + at >= seen_first;
    for (int64_t i = 0; i < some; ++i)
      for (int half = 0; half < 2; ++half) {
        const int32_t here = static_cast<int32_t>(position + at + i);
        float scale = head.a.scale;
        if constexpr (Head::kScaled) scale *= head.key_scales[here];
        Floats score = head.Score(sums[i][half] * scale, lanes[half], own[half], here);
        if (!all_seen) score = (own[half] >= here) & (from[half] <= here) ? score : Floats{} + kNone;
        weights[at + i][half] = score;
      }
  }

  // A key as it is multiplied: where it lies, if it lies so.
  const int32_t* Words(const Number* key, int32_t* room) const {
    if constexpr (sizeof(Number) == sizeof(typename Kind::Active))
      if (head.a.size % Kind::PER_PART == 0) return reinterpret_cast<const int32_t*>(key);
    room[words - 1] = 0;
    Copy(key, reinterpret_cast<typename Kind::Active*>(room));
    return room;
  }

  // Scores become weights. Returns what that makes of those before, if one is larger than all of them.
  Floats Weigh(int half, int64_t position, int64_t positions) {
    Floats most = largest[half];
    for (int64_t i = 0; i < positions; ++i) most = Larger(most, weights[i][half]);
    const Floats zero = most == kNone ? Floats{} : most;  // of those that have seen nothing yet
    const Floats smaller = Exp(largest[half] - zero);
    largest[half] = most;
    sum[half] *= smaller;
    for (int64_t i = 0; i < positions; ++i) {
      weights[i][half] = Exp(weights[i][half] - zero);
      sum[half] += weights[i][half];
      if constexpr (Head::kScaled) weights[i][half] *= head.value_scales[position + i];
    }
    return smaller;
  }

  // To the contexts of kTogether queries, of so many words of positions.
  void AddValues(int64_t query, int64_t part, int64_t joined, const float* factor) {
    Floats* to = context + query * parts + part;
    Floats sums[kTogether][kParts];
    UNROLL for (int i = 0; i < kTogether; ++i)
      UNROLL for (int j = 0; j < kParts; ++j) sums[i][j] = to[i * parts + j] * factor[i];
    const Floats* value = values + part;
    const int32_t* weight = reinterpret_cast<const int32_t*>(weights) + query;
    for (int64_t position = 0; position < joined; ++position, value += parts, weight += kQueries) {
      UNROLL for (int i = 0; i < kTogether; ++i) {
        auto same = Kind::Repeat(weight + i);
        Keep(same);
        UNROLL for (int j = 0; j < kParts; ++j)
          sums[i][j] = Kind::Add(sums[i][j], Kind::Read(reinterpret_cast<const char*>(value + j)), same);
      }
    }
    UNROLL for (int i = 0; i < kTogether; ++i)
      UNROLL for (int j = 0; j < kParts; ++j) to[i * parts + j] = sums[i][j];
  }
};

// All heads of all rows, and blocks of the queries of each.
template <typename Head>
struct Attention {
  const typename Head::Arguments& a;
  int64_t heads, blocks;  // of all rows; of queries of a head

  explicit Attention(const typename Head::Arguments& a) : a(a), heads(a.rows * a.kv_heads) {
    const int64_t queries = a.tokens * (a.heads / a.kv_heads);
    blocks = queries <= kFew ? 1 : RoundUp(queries, kQueries) / kQueries;
  }

  Head HeadAt(int64_t head) const { return Head(a, head / a.kv_heads, head % a.kv_heads); }

  void Attend(const Head& head, int64_t block) const {
    if (head.Queries() > kFew) return Many<Head>(head, block * kQueries).Run();
    const bool whole = a.size % (kLanes * kParts) == 0;
    whole ? AttendFew<4, true>(head, 0) : AttendFew<4, false>(head, 0);
  }

  template <int COUNT, bool WHOLE>
  void AttendFew(const Head& head, int64_t query) const {
    for (; query + COUNT <= head.Queries(); query += COUNT) Few<Head, COUNT, WHOLE>(head, query).Run();
    if constexpr (COUNT > 1) AttendFew<COUNT / 2, WHOLE>(head, query);
  }

  void Run(const Pool& pool) const {
    if constexpr (Head::kWrites)
      if (blocks > 1) ForEach(pool, heads, [this](int64_t head) { HeadAt(head).Write(); });
    ForEach(pool, heads * blocks, [this](int64_t piece) {
      const auto head = HeadAt(piece / blocks);
      if constexpr (Head::kWrites)
        if (blocks == 1) head.Write();
      Attend(head, piece % blocks);
    });
  }
};

}  // namespace
}  // namespace neuronx::NEURONX_LEVEL
