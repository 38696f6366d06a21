// Sampling of a token for each row, as in `layers/sampling.py`. A greedy row takes one pass over its logits.
//
// Others are sampled by an order: floats as integers of the same order. The limits of `top_k` and `top_p` are searched
// bit by bit, in 32 passes. What is kept moves to the front, so that all after `top_k` is over few tokens.
#include "lanes.h"

namespace neuronx::NEURONX_LEVEL {
namespace {

constexpr int32_t kBroken = -2;  // a logit is NaN, or the largest is not finite
constexpr float kInfinity = __builtin_inff();

int32_t LikeliestOf(const float* logits, const int8_t* seen, int64_t count, float penalty) {
  Floats most = Floats{} - kInfinity, best = most;
  Ints at = {}, index = Count(), broken = {};
  for (int64_t i = 0; i < count; i += kLanes, index += kLanes) {
    const int64_t left = count - i;
    Floats x = Some(logits + i, left);
    if (left < kLanes) x = Count() < static_cast<int32_t>(left) ? x : Floats{} - kInfinity;
    broken |= x != x;
    most = x > most ? x : most;
    if (penalty != 1) x = Some(seen + i, left) != 0 ? (x < 0 ? x * penalty : x / penalty) : x;
    at = x > best ? index : at;
    best = x > best ? x : best;
  }
  float largest = -kInfinity, chosen = largest;
  int32_t token = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (broken[lane]) return kBroken;
    if (most[lane] > largest) largest = most[lane];
    if (best[lane] > chosen || (best[lane] == chosen && at[lane] < token)) {
      chosen = best[lane];
      token = at[lane];
    }
  }
  return largest > -kInfinity && largest < kInfinity ? token : kBroken;
}

// Integers in the order of the floats that have these bits; twice gives the bits again.
inline Ints Ordered(Ints bits) { return bits ^ ((bits >> 31) & 0x7fffffff); }

// ln(x) of positive normal numbers, with a relative error of about 2e-7: the polynomial of Cephes' logf.
inline Floats Log(Floats x) {
  const Ints bits = Cast<Ints>(x), exponent = (bits - 0x3f3504f3) >> 23;  // the rest is from 1 / sqrt(2) to sqrt(2)
  const Floats turns = __builtin_convertvector(exponent, Floats);
  const Floats f = Cast<Floats>(bits - exponent * (1 << 23)) - 1;
  constexpr float kFactors[] = {7.0376836292e-2f,  -1.1514610310e-1f, 1.1676998740e-1f,
                                -1.2420140846e-1f, 1.4249322787e-1f,  -1.6668057665e-1f,
                                2.0000714765e-1f,  -2.4999993993e-1f, 3.3333331174e-1f};
  Floats power = Floats{} + kFactors[0];
  UNROLL16 for (int i = 1; i < 9; ++i) power = power * f + kFactors[i];
  const Floats square = f * f;
  return turns * 0.693359375f + (f + (power * f * square - turns * 2.12194440e-4f - square * 0.5f));
}

// Threefry-2x32 with 20 rounds: the first word of random bits.
inline UInts Threefry(uint32_t key0, uint32_t key1, uint32_t counter0, UInts counter1) {
  constexpr int kRotations[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  const uint32_t keys[] = {key0, key1, key0 ^ key1 ^ 0x1bd11bdau};
  UInts a = UInts{} + (counter0 + keys[0]), b = counter1 + keys[1];
  UNROLL for (int group = 0; group < 5; ++group) {
    UNROLL for (const int distance : kRotations[group % 2]) {
      a += b;
      b = a ^ (b << distance | b >> (32 - distance));
    }
    a += keys[(group + 1) % 3];
    b += keys[(group + 2) % 3] + (group + 1);
  }
  return a;
}

// Noise of the standard Gumbel distribution from random bits.
inline Floats Gumbel(UInts bits) {
  const Floats uniform = (__builtin_convertvector(bits, Floats) + 0.5f) * 0x1p-32f, rest = 1 - uniform;
  // -log1p(-uniform): the logarithm of the rounded rest, times what rounding has changed.
  const Floats some = rest > 0 && rest < 1 ? rest : Floats{} + 0.5f;
  const Floats wide = rest < 1 ? Log(some) * (uniform / (some - 1)) : uniform;
  return rest > 0 ? -Log(wide) : Floats{} - kInfinity;
}

// The largest key for which `holds`, which is so for all smaller ones.
template <typename Holds>
int32_t LargestKey(const Holds& holds) {
  uint32_t key = 0;
  for (uint32_t bit = 1u << 31; bit; bit >>= 1) {
    if (holds(static_cast<int32_t>((key | bit) ^ 1u << 31))) key |= bit;
  }
  return static_cast<int32_t>(key ^ 1u << 31);
}

// The tokens of a row that can still be drawn. Arrays have room for whole vectors.
struct Tokens {
  int64_t count;
  int32_t *keys, *ids;
  float* weights;

  // Fills the last vector with tokens that are never drawn.
  void Pad() {
    for (int64_t i = count; i < RoundUp(count, kLanes); ++i) {
      keys[i] = INT32_MIN;
      ids[i] = 0;
      weights[i] = 0;
    }
  }

  Floats Logits(int64_t i) const {
    const Ints key = Load<Ints>(keys + i);
    return key == INT32_MIN ? Floats{} - kInfinity : Cast<Floats>(Ordered(key));
  }

  template <typename Keep>
  void Only(const Keep& keep) {
    int64_t left = 0;
    for (int64_t i = 0; i < count; ++i) {
      if (!keep(i)) continue;
      keys[left] = keys[i];
      ids[left] = ids[i];
      weights[left++] = weights[i];
    }
    count = left;
    Pad();
  }

  void OnlyLargest(int64_t wanted) {
    const int32_t limit = LargestKey([&](int32_t key) {
      Ints larger = {};
      for (int64_t i = 0; i < count; i += kLanes) larger -= Load<Ints>(keys + i) >= key;
      int64_t sum = 0;
      for (int lane = 0; lane < kLanes; ++lane) sum += larger[lane];
      return sum >= wanted;
    });
    Only([&](int64_t i) { return keys[i] >= limit; });
  }

  void Weigh() {
    Ints most = Ints{} + INT32_MIN;
    for (int64_t i = 0; i < count; i += kLanes) most = Load<Ints>(keys + i) > most ? Load<Ints>(keys + i) : most;
    const Floats largest = Cast<Floats>(Ordered(Ints{} + Most(most)));
    for (int64_t i = 0; i < count; i += kLanes) {
      const Floats weight = Exp(Logits(i) - largest);
      memcpy(weights + i, &weight, sizeof weight);
    }
  }

  void OnlyHeaviest(float share) {
    const auto sum_from = [&](int32_t key) {
      Floats sum = {};
      for (int64_t i = 0; i < count; i += kLanes) sum += Load<Ints>(keys + i) >= key ? Load<Floats>(weights + i) : Floats{};
      return Total(sum);
    };
    const float wanted = sum_from(INT32_MIN) * share;
    const int32_t limit = LargestKey([&](int32_t key) { return sum_from(key) >= wanted; });
    Only([&](int64_t i) { return keys[i] >= limit; });
  }

  int32_t Drawn(uint32_t seed, uint32_t stream, uint32_t position, int32_t otherwise) const {
    Floats best = Floats{} - kInfinity;
    Ints token = Ints{} + otherwise;
    for (int64_t i = 0; i < count; i += kLanes) {
      const Ints id = Load<Ints>(ids + i);
      const Floats x = Logits(i) + Gumbel(Threefry(seed, stream, position, Cast<UInts>(id)));
      token = x > best ? id : token;
      best = x > best ? x : best;
    }
    int lucky = 0;
    for (int lane = 1; lane < kLanes; ++lane) {
      if (best[lane] > best[lucky] || (best[lane] == best[lucky] && token[lane] < token[lucky])) lucky = lane;
    }
    return token[lucky];
  }
};

int32_t Sampled(const SampleArguments& a, int64_t row, Tokens tokens) {
  const float* logits = a.logits + row * a.vocabulary;
  const int8_t* seen = a.seen + row * a.vocabulary;
  const int32_t* policy = a.policy + row * kPolicyColumns;
  float rules[4];  // temperature, top_p, min_p, repetition penalty
  memcpy(rules, policy + 1, sizeof rules);
  const auto [temperature, top_p, min_p, penalty] = rules;
  const int32_t top_k = policy[0], likeliest = LikeliestOf(logits, seen, a.vocabulary, penalty);
  if (top_k == 1 || likeliest < 0) return likeliest;

  for (int64_t i = 0; i < a.vocabulary; i += kLanes) {
    const int64_t left = a.vocabulary - i;
    Floats x = Some(logits + i, left);
    if (penalty != 1) x = Some(seen + i, left) != 0 ? (x < 0 ? x * penalty : x / penalty) : x;
    const Ints key = Ordered(Cast<Ints>(x / temperature)), id = Count() + static_cast<int32_t>(i);
    memcpy(tokens.keys + i, &key, sizeof key);
    memcpy(tokens.ids + i, &id, sizeof id);
  }
  tokens.count = a.vocabulary;
  tokens.Pad();
  if (top_k > 0 && top_k < a.vocabulary) tokens.OnlyLargest(top_k);
  if (top_p < 1 || min_p > 0) tokens.Weigh();
  if (top_p < 1) tokens.OnlyHeaviest(top_p);
  if (min_p > 0) tokens.Only([&, least = min_p](int64_t i) { return tokens.weights[i] >= least; });
  return tokens.Drawn(policy[5], policy[6], a.position[row], likeliest);
}

int64_t Together(const SampleArguments& a) { return Least(a.rows, 8); }  // rows at once
int64_t Room(const SampleArguments& a) { return RoundUp(a.vocabulary, kLanes) * 4; }  // bytes of an array of tokens

}  // namespace

int64_t SampleScratch(const SampleArguments& a) { return Together(a) * 3 * Room(a); }

void Sample(const SampleArguments& a, const Pool& pool) {
  const int64_t together = Together(a), room = Room(a);
  ForEach(pool, together, [&](int64_t piece) {
    char* own = static_cast<char*>(a.scratch) + piece * 3 * room;
    const auto array = [&](int64_t number) { return own + number * room; };
    const Tokens tokens = {0, reinterpret_cast<int32_t*>(array(0)), reinterpret_cast<int32_t*>(array(1)),
                           reinterpret_cast<float*>(array(2))};
    for (int64_t row = piece; row < a.rows; row += together) a.token[row] = Sampled(a, row, tokens);
  });
}

}  // namespace neuronx::NEURONX_LEVEL
