// Vectors as wide as the level has them, and the products that the kernels are made of.
//
// A Kind says how weights and activations are stored, and adds the products of STEP of each to a vector of sums. Weights
// are read as they lie in memory; activations are prepared once for all rows of the weight.
#pragma once

#include <cstdint>
#include <cstring>
#ifdef __x86_64__
#include <immintrin.h>
#endif

#include "kernels.h"

namespace neuronx::NEURONX_LEVEL {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;  // of 32 bits
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef int16_t Shorts __attribute__((vector_size(kLanes * 4)));

template <typename To, typename From>
inline To Load(const From* from) {
  To to;
  memcpy(&to, from, sizeof to);
  return to;
}

template <typename To, typename From>
inline To Cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

inline float Total(Floats sums) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(Cast<__m512>(sums));
#else
  typedef float Four __attribute__((vector_size(16)));
  Four parts[kLanes / 4];
  memcpy(parts, &sums, sizeof sums);
  for (int part = 1; part < kLanes / 4; ++part) parts[0] += parts[part];
  return (parts[0][0] + parts[0][1]) + (parts[0][2] + parts[0][3]);
#endif
}

inline Floats AsFloats(Floats x) { return x; }
inline Floats AsFloats(Ints x) { return __builtin_convertvector(x, Floats); }

// Numbers of 16 bits as floats.
inline float FromBF16(uint16_t x) { return Cast<float>(uint32_t{x} << 16); }

inline Floats FromBF16(const uint16_t* x) {
  typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));
  typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
  return Cast<Floats>(__builtin_convertvector(Load<Halves>(x), Words) << 16);
}

inline float FromF16(uint16_t x) {
  const uint32_t sign = uint32_t{x & 0x8000u} << 16, magnitude = x & 0x7fffu;
  // A float with the same exponent is 2^-112 times as large; infinities and NaN keep all bits of theirs.
  const uint32_t bits = magnitude << 13;
  const float value = magnitude >= 0x7c00u ? Cast<float>(bits | 0x7f800000u) : Cast<float>(bits) * 0x1p112f;
  return Cast<float>(Cast<uint32_t>(value) | sign);
}

inline Floats FromF16(const uint16_t* x) {
#if defined(__AVX512F__)
  return Cast<Floats>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x))));
#elif defined(__F16C__)
  return Cast<Floats>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))));
#else
  Floats floats;
  for (int lane = 0; lane < kLanes; ++lane) floats[lane] = FromF16(x[lane]);
  return floats;
#endif
}

// sums + products of shorts, each of two neighbours added.
inline Ints AddProducts(Ints sums, Shorts a, Shorts b) {
#if defined(__AVX512VNNI__)
  return Cast<Ints>(_mm512_dpwssd_epi32(Cast<__m512i>(sums), Cast<__m512i>(a), Cast<__m512i>(b)));
#elif defined(__AVX512BW__)
  return sums + Cast<Ints>(_mm512_madd_epi16(Cast<__m512i>(a), Cast<__m512i>(b)));
#elif defined(__AVX2__)
  return sums + Cast<Ints>(_mm256_madd_epi16(Cast<__m256i>(a), Cast<__m256i>(b)));
#elif defined(__SSE2__)
  return sums + Cast<Ints>(_mm_madd_epi16(Cast<__m128i>(a), Cast<__m128i>(b)));
#else
  for (int lane = 0; lane < kLanes; ++lane)
    sums[lane] += int32_t{a[2 * lane]} * b[2 * lane] + int32_t{a[2 * lane + 1]} * b[2 * lane + 1];
  return sums;
#endif
}

// Kinds. RUN is how many steps sums can take before they have to become floats, PACKED the inputs in one Weight.
struct F32 {
  using Weight = float;
  using Active = float;
  using Sums = Floats;
  using Vector = Floats;
  static constexpr int64_t STEP = kLanes, RUN = int64_t{1} << 40, PACKED = 1;
  static Vector LoadWeight(const Weight* w) { return Load<Floats>(w); }
  static Vector LoadActive(const Active* x) { return Load<Floats>(x); }
  static Sums Add(Sums sums, Vector w, Vector x) { return sums + w * x; }
};

struct F16 : F32 {
  using Weight = uint16_t;
  static Vector LoadWeight(const Weight* w) { return FromF16(w); }
};

#if defined(__AVX512BF16__)
struct BF16 {
  using Weight = uint16_t;
  using Active = uint16_t;
  using Sums = Floats;
  using Vector = __m512bh;
  static constexpr int64_t STEP = 2 * kLanes, RUN = int64_t{1} << 40, PACKED = 1;
  static Vector LoadWeight(const Weight* w) { return Load<Vector>(w); }
  static Vector LoadActive(const Active* x) { return Load<Vector>(x); }
  static Sums Add(Sums sums, Vector w, Vector x) {
    return Cast<Floats>(_mm512_dpbf16_ps(Cast<__m512>(sums), w, x));
  }
};
#else
struct BF16 : F32 {
  using Weight = uint16_t;
  static Vector LoadWeight(const Weight* w) { return FromBF16(w); }
};
#endif

// Weights of 8 bits times activations of 16: their sums are whole numbers, and exact.
struct S8 {
  using Weight = int8_t;
  using Active = int16_t;
  using Sums = Ints;
  using Vector = Shorts;
  static constexpr int64_t STEP = 2 * kLanes, PACKED = 1, RUN = 128;  // times 2 * 128 * 32767 is below 2^31
  static int64_t Place(int64_t input, int64_t) { return input; }
  static Vector LoadWeight(const Weight* w) {
    typedef int8_t Bytes __attribute__((vector_size(kLanes * 2)));
    return __builtin_convertvector(Load<Bytes>(w), Shorts);
  }
  static Vector LoadActive(const Active* x) { return Load<Shorts>(x); }
  static Sums Add(Sums sums, Vector w, Vector x) { return AddProducts(sums, w, x); }
};

// Weights of 4 bits, two in a byte: of a group's inputs the first half in the low bits, the second half in the high
// ones. So of BYTES bytes the activations lie in two vectors, those of the low bits and those of the high ones.
struct S4 {
  using Weight = uint8_t;
  using Active = int16_t;
  static constexpr int64_t BYTES = 2 * kLanes, STEP = 2 * BYTES, PACKED = 2;

  static int64_t Place(int64_t input, int64_t group) {
    const int64_t inside = input % group, half = group / 2;
    const int64_t byte = input / group * half + inside % half;
    return byte / BYTES * STEP + (inside < half ? 0 : BYTES) + byte % BYTES;
  }

  static Shorts LoadWeight(const Weight* w) {
    typedef int8_t Bytes __attribute__((vector_size(BYTES)));
    return __builtin_convertvector(Load<Bytes>(w), Shorts);
  }

  static Shorts LoadPart(const Weight* w, int64_t count) {
    Weight part[BYTES] = {};
    memcpy(part, w, count);
    return LoadWeight(part);
  }

  static Floats Scales(const float* scale, int64_t step, int64_t group, int64_t groups) {
    const int64_t first = step * STEP / group, second = (step * STEP + STEP / 2) / group;
    Floats scales = Floats{} + scale[first];
#if defined(__AVX512F__)
    if (second != first && second < groups)
      scales = Cast<Floats>(_mm512_mask_broadcastss_ps(Cast<__m512>(scales), 0xff00, _mm_load_ss(scale + second)));
#else
    static_assert(STEP <= 32);  // the smallest group
    (void)second, (void)groups;
#endif
    return scales;
  }
};

}  // namespace
}  // namespace neuronx::NEURONX_LEVEL
