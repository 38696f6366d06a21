// Operations between the lanes of vectors.
#pragma once

#include <type_traits>

#include "vectors.h"

namespace neuronx::NEURONX_LEVEL {
namespace {

// 0, 1, 2, ...
inline Ints Count() {
  Ints count;
  for (int lane = 0; lane < kLanes; ++lane) count[lane] = lane;
  return count;
}

// The largest of all lanes, none of which is NaN.
template <typename Vector>
inline auto Most(Vector x) {
#if defined(__AVX512F__)
  if constexpr (std::is_same<Vector, Floats>::value) return _mm512_reduce_max_ps(Cast<__m512>(x));
  else return _mm512_reduce_max_epi32(Cast<__m512i>(x));
#else
  auto most = x[0];
  for (int lane = 1; lane < kLanes; ++lane) most = x[lane] > most ? x[lane] : most;
  return most;
#endif
}

// The sum of all lanes: of neighbours, then of neighbouring sums, in the same order as `Totals`.
inline float Total(Floats sums) {
#if defined(__AVX512F__)
  const __m512i even = Cast<__m512i>(Count() * 2), odd = Cast<__m512i>(Count() * 2 + 1);
  UNROLL for (int step = 1; step < kLanes; step *= 2) {
    const __m512 all = Cast<__m512>(sums);
    sums = Cast<Floats>(_mm512_permutexvar_ps(even, all)) + Cast<Floats>(_mm512_permutexvar_ps(odd, all));
  }
#else
  for (int count = kLanes / 2; count; count /= 2)
    for (int i = 0; i < count; ++i) sums[i] = sums[2 * i] + sums[2 * i + 1];
#endif
  return sums[0];
}

// The floats at the offsets `at`, one in each lane.
inline Floats Gather(const float* from, Ints at) {
#if defined(__AVX512F__)
  return Cast<Floats>(_mm512_i32gather_ps(Cast<__m512i>(at), from, sizeof *from));
#elif defined(__AVX2__)
  return Cast<Floats>(_mm256_i32gather_ps(from, Cast<__m256i>(at), sizeof *from));
#else
  Floats floats;
  for (int lane = 0; lane < kLanes; ++lane) floats[lane] = from[at[lane]];
  return floats;
#endif
}

// The total of each vector, one in each lane.
inline Floats Totals(Floats (&sums)[kLanes]) {
#if defined(__AVX512F__)
  const __m512i even = Cast<__m512i>(Count() * 2), odd = Cast<__m512i>(Count() * 2 + 1);
  for (int count = kLanes / 2; count; count /= 2)
    UNROLL for (int i = 0; i < count; ++i) {
      const __m512 a = Cast<__m512>(sums[2 * i]), b = Cast<__m512>(sums[2 * i + 1]);
      sums[i] = Cast<Floats>(_mm512_permutex2var_ps(a, even, b)) + Cast<Floats>(_mm512_permutex2var_ps(a, odd, b));
    }
  return sums[0];
#elif defined(__aarch64__)
  const auto pairs = [&](int i) { return vpaddq_f32(Cast<float32x4_t>(sums[i]), Cast<float32x4_t>(sums[i + 1])); };
  return Cast<Floats>(vpaddq_f32(pairs(0), pairs(2)));
#else
  Floats totals;
  for (int lane = 0; lane < kLanes; ++lane) totals[lane] = Total(sums[lane]);
  return totals;
#endif
}

// Swaps rows and columns.
inline void Transpose(Ints (&rows)[kLanes]) {
#if defined(__AVX512F__)
  UNROLL for (int step = 1; step < kLanes; step *= 2) {  // pairs of rows exchange half of their lanes
    const Ints lane = Count(), low = (lane & step) != 0 ? lane + (kLanes - step) : lane;
    const __m512i first = Cast<__m512i>(low), second = Cast<__m512i>(low + step);
    UNROLL16 for (int i = 0; i < kLanes; ++i) {
      if (i & step) continue;
      const __m512i a = Cast<__m512i>(rows[i]), b = Cast<__m512i>(rows[i + step]);
      rows[i] = Cast<Ints>(_mm512_permutex2var_epi32(a, first, b));
      rows[i + step] = Cast<Ints>(_mm512_permutex2var_epi32(a, second, b));
    }
  }
#elif defined(__aarch64__)
  int64x2_t half[4];
  UNROLL for (int i = 0; i < 4; i += 2) {
    const int32x4_t a = Cast<int32x4_t>(rows[i]), b = Cast<int32x4_t>(rows[i + 1]);
    half[i] = vreinterpretq_s64_s32(vtrn1q_s32(a, b)), half[i + 1] = vreinterpretq_s64_s32(vtrn2q_s32(a, b));
  }
  UNROLL for (int i = 0; i < 2; ++i) {
    rows[i] = Cast<Ints>(vtrn1q_s64(half[i], half[i + 2]));
    rows[i + 2] = Cast<Ints>(vtrn2q_s64(half[i], half[i + 2]));
  }
#else
  for (int i = 0; i < kLanes; ++i)
    for (int j = 0; j < i; ++j) {
      const int32_t each = rows[i][j];
      rows[i][j] = rows[j][i];
      rows[j][i] = each;
    }
#endif
}

}  // namespace
}  // namespace neuronx::NEURONX_LEVEL
