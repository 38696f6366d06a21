// Rows of activations as products need them: in another type, or as integers with a factor.
#pragma once

#include <type_traits>

#include "kinds.h"

namespace neuronx::NEURONX_LEVEL {
namespace {

// Whether activations already have the type that they would be prepared to.
inline bool Prepared(const LinearArguments& a, float*) { return a.x_type == Type::kF32; }
inline bool Prepared(const LinearArguments& a, BFloat16*) { return a.x_type == Type::kBF16; }
template <typename Integer>
inline bool Prepared(const LinearArguments&, Integer*) { return false; }

// Prepares a row of activations, from element `first` on.
inline void Prepare(const LinearArguments& a, int64_t first, float* out) {
  Widen(a.x, a.x_type, first, a.inputs, out);
}

inline void Prepare(const LinearArguments& a, int64_t first, BFloat16* out) {
  memcpy(out, static_cast<const BFloat16*>(a.x) + first, a.inputs * sizeof *out);
}

// The largest magnitude of some activations, or infinity or NaN if there is one.
inline float Largest(const LinearArguments& a, int64_t first, int64_t count) {
  Ints bits = {};  // magnitudes are ordered like their bits, with non-finite ones last
  for (int64_t i = 0; i < count; i += kLanes) {
    const Ints size = Cast<Ints>(Some(a.x, a.x_type, first + i, count - i)) & 0x7fffffff;
    bits = size > bits ? size : bits;
  }
  return Cast<float>(Most(bits));
}

// What activations that are rounded to integers are multiplied by afterwards, and before.
struct Rounding {
  float factor, inverse;
  bool Finite() const { return factor == factor; }
};

// That of some activations, the largest to `most`. The factor is NaN if one of them is not finite.
inline Rounding RoundingOf(const LinearArguments& a, int64_t first, int64_t count, int most) {
  const float scale = Largest(a, first, count) * (1.0f / static_cast<float>(most));
  if (!(scale < __builtin_inff())) return {__builtin_nanf(""), 0};
  return {scale, scale > 1e-37f ? 1 / scale : 0};  // for less, it would be infinite
}

// Rounds some activations to integers, the largest to MOST, in the order of a Kind. `out` has room for whole words. Returns
// the factor to multiply them by, which is NaN if one of them is not finite.
template <typename Kind>
float Round(const LinearArguments& a, int64_t first, int64_t count, typename Kind::Active* out) {
  constexpr int64_t kWord = kInputs<Kind>;
  constexpr int64_t kSet = Kind::SPLIT && kWord < kSplit ? kSplit : kWord;  // elements that are set together
  constexpr int64_t kBlock = kLanes > kSet ? kLanes : kSet;
  const Rounding rounding = RoundingOf(a, first, count, Kind::MOST);
  if (!rounding.Finite()) {
    memset(out, 0, RoundUp(count, kSet) * sizeof *out * (1 + Kind::SPLIT));
    return rounding.factor;
  }
  for (int64_t i = 0; i < count; i += kBlock) {
    std::conditional_t<Kind::SPLIT, int16_t, typename Kind::Active> block[kBlock] = {};
    for (int64_t j = 0; j < kBlock && i + j < count; j += kLanes)
      Put(Rounded(Some(a.x, a.x_type, first + i + j, count - i - j) * rounding.inverse), block + j);
    const int64_t end = Least(RoundUp(count - i, kSet), kBlock);
    if constexpr (Kind::SPLIT) {  // the order is that of inputs
      for (int64_t j = 0; j < end; j += kSplit) Kind::Set(out, i + j, block + j);
    } else {
      for (int64_t j = 0; j < end; j += kWord)
        UNROLL for (int64_t k = 0; k < kWord; ++k) Kind::Set(out, i + j + k, block[j + Kind::ORDER[k]]);
    }
  }
  return rounding.factor;
}

}  // namespace
}  // namespace neuronx::NEURONX_LEVEL
