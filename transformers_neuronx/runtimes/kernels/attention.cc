// Attention over the cache, as in `layers/attention.py`. It writes the new keys and values, and reads only positions in
// use.
#include "attention.h"

namespace neuronx::NEURONX_LEVEL {
namespace {

// In the cache, the positions of a head are adjacent.
template <typename Number>
struct Cached : HeadOf<Number, AttentionArguments> {
  using Base = HeadOf<Number, AttentionArguments>;
  using Base::a, Base::row, Base::head, Base::group, Base::first_token, Base::tokens, Base::HeadOfQuery;
  static constexpr bool kScaled = sizeof(Number) == 1, kWrites = true;

  int64_t first, length;       // position of the first token; number of tokens
  const int32_t* table;        // the row's pages
  const int64_t shift;         // position >> shift is a position's place in the table
  Number *keys, *values;       // of this head in page 0
  float *key_scales, *value_scales;

  // The slopes of queries, and the offsets of their biases.
  struct Lanes {
    Floats slope = {};
    Ints biases = {};

    Lanes(const Cached& head, int64_t query, int64_t count) {
      for (int64_t i = 0; i < Least(count, kLanes); ++i) {
        slope[i] = head.Slope(query + i);
        biases[i] = static_cast<int32_t>(head.HeadOfQuery(query + i) * head.a.distances);
      }
    }
  };

  Cached(const AttentionArguments& a, int64_t row, int64_t head)
      : Base(a, row, head, a.first ? a.first[row * a.stride] : row * a.tokens, Tokens(a, row)),
        first(a.start[row * a.stride]), length(Least(a.length[row * a.stride], tokens)),
        table(a.table ? a.table + row * a.stride : nullptr), shift(a.most > 1 ? __builtin_ctzll(a.page) : 62),
        keys(static_cast<Number*>(a.keys) + head * a.page * a.size),
        values(static_cast<Number*>(a.values) + head * a.page * a.size),
        key_scales(kScaled ? a.key_scales + head * a.page : nullptr),
        value_scales(kScaled ? a.value_scales + head * a.page : nullptr) {
    length = Least(length, a.most * a.page - first);
    bool inside = first >= 0;
    for (int64_t page = 0; inside && page << shift < first + length; ++page)
      inside = PageOf(page) >= 0 && PageOf(page) < a.pages;
    if (!inside) length = 0;  // outside the cache, nothing is written or read
  }

  static int64_t Tokens(const AttentionArguments& a, int64_t row) {
    if (!a.first) return a.tokens;
    const int64_t count = Least(a.length[row * a.stride], a.tokens - a.first[row * a.stride]);
    return a.first[row * a.stride] >= 0 && count > 0 ? count : 0;
  }

  static bool Together(const AttentionArguments& a, int64_t row, bool many) {
    return a.prompt ? a.prompt[row * a.stride] != 0 : many;
  }

  int64_t PageOf(int64_t place) const { return table ? table[place] : row; }

  // The place of a position among those of this head in page 0.
  int64_t Place(int64_t position) const {
    const int64_t page = position >> shift;
    return PageOf(page) * a.kv_heads * a.page + (position - (page << shift));
  }

  // Positions of a page are adjacent.
  int64_t Stride() const { return a.size; }
  int64_t Adjacent() const { return a.page; }
  const Number* Key(int64_t position) const { return keys + Place(position) * a.size; }
  const Number* Value(int64_t position) const { return values + Place(position) * a.size; }
  const float* KeyScales(int64_t position) const { return key_scales + Place(position); }
  const float* ValueScales(int64_t position) const { return value_scales + Place(position); }

  int64_t Own(int64_t query) const { return query / group < length ? first + query / group : -1; }
  int64_t Oldest(int64_t own) const {
    const int64_t near = a.window > 0 && own >= a.window ? own - a.window + 1 : 0;
    const int64_t begin = a.chunk > 0 && own > 0 ? own - own % a.chunk : 0;
    return near > begin ? near : begin;
  }
  float Sink(int64_t query) const { return a.sinks ? a.sinks[HeadOfQuery(query)] : kNone; }
  float Slope(int64_t query) const { return a.slopes ? a.slopes[HeadOfQuery(query)] : 0; }

  Floats Score(Floats products, int64_t query, int64_t, int64_t, Ints distance) const {
    const Floats score = Capped(products);
    return a.slopes || a.biases ? score + Apart(query, distance) : score;
  }

  using Base::Ask;
  void Ask(const Lanes (&)[2], int64_t, bool) const {}

  void Score(int half, const Lanes& lanes, Ints own, int64_t position, int64_t count, Floats (*scores)[2]) const {
    const Ints distance = own - static_cast<int32_t>(position);
    if (a.softcap > 0)
      for (int i = 0; i < count; ++i) scores[i][half] = Capped(scores[i][half]);
    if (a.slopes)
      for (int i = 0; i < count; ++i) scores[i][half] -= lanes.slope * __builtin_convertvector(distance - i, Floats);
    if (a.biases)
      for (int i = 0; i < count; ++i) scores[i][half] += Gather(a.biases, lanes.biases + Within(distance - i));
  }

  // What is added to a query's scores at a distance. Not inlined, since the loop over keys is faster without it.
  __attribute__((noinline)) Floats Apart(int64_t query, Ints distance) const {
    const Floats fall = Slope(query) * __builtin_convertvector(distance, Floats);
    return a.biases ? Gather(a.biases + HeadOfQuery(query) * a.distances, Within(distance)) - fall : -fall;
  }

  Ints Within(Ints distance) const {  // limited to those with a bias; unseen positions may have any
    const Ints last = Ints{} + static_cast<int32_t>(a.distances - 1);
    return distance < 0 ? Ints{} : distance > last ? last : distance;
  }

  Floats Capped(Floats scores) const {  // cap * tanh(scores / cap)
    if (a.softcap <= 0) return scores;
    return a.softcap - 2 * a.softcap / (Exp(scores * (2 / a.softcap)) + 1);
  }

  void Write() const {
    for (int64_t token = 0; token < length; ++token) {
      const int64_t from = ((first_token + token) * a.kv_heads + head) * a.size, to = Place(first + token);
      Put(a.k, from, keys + to * a.size, kScaled ? key_scales + to : nullptr);
      if (a.v) Put(a.v, from, values + to * a.size, kScaled ? value_scales + to : nullptr);
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
    const bool some = *scale > 0 && *scale < __builtin_inff();  // otherwise the scale alone determines the numbers
    const float inverse = some ? 1 / *scale : 0;
    for (int64_t i = 0; i < a.size; ++i) to[i] = static_cast<int8_t>(some ? __builtin_rintf(wide[i] * inverse) : 0);
  }
};

// Sets the context of tokens that no row has to zero.
void ClearRest(const AttentionArguments& a) {
  int64_t used = 0;
  for (int64_t row = 0; row < a.rows; ++row) {
    const int64_t end = int64_t{a.first[row * a.stride]} + a.length[row * a.stride];
    if (a.length[row * a.stride] > 0 && end > used) used = Least(end, a.tokens);
  }
  const int64_t bytes = a.heads * a.size * (a.type == Type::kF32 ? 4 : 2);
  memset(static_cast<char*>(a.context) + used * bytes, 0, (a.tokens - used) * bytes);
}

}  // namespace

void Attend(const AttentionArguments& arguments, const Pool& pool) {
  if (arguments.first) ClearRest(arguments);
  switch (arguments.cached) {
    case Type::kF32: return Attention<Cached<float>>(arguments).Run(pool);
    case Type::kBF16: return Attention<Cached<BFloat16>>(arguments).Run(pool);
    case Type::kF16: return Attention<Cached<Float16>>(arguments).Run(pool);
    case Type::kS8: return Attention<Cached<int8_t>>(arguments).Run(pool);
    default: return;
  }
}

}  // namespace neuronx::NEURONX_LEVEL
