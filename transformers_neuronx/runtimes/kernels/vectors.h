// Vectors of the level's width: conversion of numbers of any type to floats and back, and operations on vectors.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "kernels.h"

#define UNROLL _Pragma("GCC unroll 8")
#define UNROLL16 _Pragma("GCC unroll 16")

namespace neuronx::NEURONX_LEVEL {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;  // of 32 bits
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

// Of vectors.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRegisters = 32;
#else
constexpr int kRegisters = 16;
#endif

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef uint32_t UInts __attribute__((vector_size(kLanes * 4)));
typedef int16_t Shorts __attribute__((vector_size(kLanes * 4)));
typedef uint16_t UShorts __attribute__((vector_size(kLanes * 4)));
typedef int8_t Bytes __attribute__((vector_size(kLanes * 4)));
typedef uint8_t UBytes __attribute__((vector_size(kLanes * 4)));

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

// Keeps a vector in a register. Compilers would otherwise load it for each use.
template <typename Vector>
inline void Keep(Vector& x) {
#if defined(__x86_64__)
  asm("" : "+v"(x));
#elif defined(__aarch64__)
  asm("" : "+w"(x));
#endif
}

inline int64_t Least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t RoundUp(int64_t x, int64_t step) { return (x + step - 1) / step * step; }

// Runs body(i) for every i of [0, count) on the threads of the pool.
template <typename Body>
inline void ForEach(const Pool& pool, int64_t count, const Body& body) {
  if (count == 0) return;
  const auto run = [](void* self, int64_t i) { (*static_cast<const Body*>(self))(i); };
  pool.run(pool.pool, count, run, const_cast<Body*>(&body));
}

inline Floats AsFloats(Floats x) { return x; }
inline Floats AsFloats(Ints x) { return __builtin_convertvector(x, Floats); }

// Rounds to the nearest integer.
inline Ints Rounded(Floats x) {
#if defined(__AVX512F__)
  return Cast<Ints>(_mm512_cvtps_epi32(Cast<__m512>(x)));
#elif defined(__AVX2__)
  return Cast<Ints>(_mm256_cvtps_epi32(Cast<__m256>(x)));
#elif defined(__SSE2__)
  return Cast<Ints>(_mm_cvtps_epi32(Cast<__m128>(x)));
#elif defined(__aarch64__)
  return Cast<Ints>(vcvtnq_s32_f32(Cast<float32x4_t>(x)));
#else
  Ints whole;
  for (int lane = 0; lane < kLanes; ++lane) whole[lane] = static_cast<int32_t>(__builtin_rintf(x[lane]));
  return whole;
#endif
}

// Numbers of any type as floats.

struct BFloat16 { uint16_t bits; };
struct Float16 { uint16_t bits; };

inline float AsFloat(BFloat16 x) { return Cast<float>(uint32_t{x.bits} << 16); }
inline float AsFloat(Float16 x) {
  const uint32_t sign = uint32_t{x.bits & 0x8000u} << 16, magnitude = x.bits & 0x7fffu;
  // A float with the same exponent is 2^-112 times as large. Infinities and NaN keep all their bits. Below 2^-14, such a
  // float would be subnormal, and XLA lets processors take these for zeros.
  const uint32_t bits = magnitude << 13;
  const float value = magnitude >= 0x7c00u  ? Cast<float>(bits | 0x7f800000u)
                      : magnitude < 0x400u ? static_cast<float>(magnitude) * 0x1p-24f
                                           : Cast<float>(bits) * 0x1p112f;
  return Cast<float>(Cast<uint32_t>(value) | sign);
}

inline Ints Whole(const int8_t* from) {
#if defined(__AVX512F__)
  return Cast<Ints>(_mm512_cvtepi8_epi32(Load<__m128i>(from)));
#elif defined(__AVX2__)
  return Cast<Ints>(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#elif defined(__aarch64__)
  const int8x8_t bytes = vreinterpret_s8_u32(vdup_n_u32(Load<uint32_t>(from)));
  return Cast<Ints>(vmovl_s16(vget_low_s16(vmovl_s8(bytes))));
#else
  typedef int8_t Quarter __attribute__((vector_size(kLanes)));
  return __builtin_convertvector(Load<Quarter>(from), Ints);
#endif
}

// kLanes numbers as floats.
inline Floats Widened(const float* from) { return Load<Floats>(from); }
inline Floats Widened(const BFloat16* from) {
#if defined(__AVX512F__)
  return Cast<Floats>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(Load<__m256i>(from)), 16));
#elif defined(__AVX2__)
  return Cast<Floats>(_mm256_slli_epi32(_mm256_cvtepu16_epi32(Load<__m128i>(from)), 16));
#elif defined(__aarch64__)
  return Cast<Floats>(vshll_n_u16(Load<uint16x4_t>(from), 16));
#else
  typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));
  typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
  return Cast<Floats>(__builtin_convertvector(Load<Halves>(from), Words) << 16);
#endif
}
inline Floats Widened(const Float16* from) {
#if defined(__AVX512F__)
  return Cast<Floats>(_mm512_cvtph_ps(Load<__m256i>(from)));
#elif defined(__F16C__)
  return Cast<Floats>(_mm256_cvtph_ps(Load<__m128i>(from)));
#elif defined(__aarch64__)
  return Cast<Floats>(vcvt_f32_f16(Load<float16x4_t>(from)));
#else
  Floats floats;
  for (int lane = 0; lane < kLanes; ++lane) floats[lane] = AsFloat(from[lane]);
  return floats;
#endif
}
inline Floats Widened(const int8_t* from) { return AsFloats(Whole(from)); }

// Up to kLanes numbers as floats, padded with zeros.
template <typename Number>
inline Floats Some(const Number* from, int64_t count) {
  if (count >= kLanes) return Widened(from);
  Number part[kLanes] = {};
  memcpy(part, from, count * sizeof *from);
  return Widened(part);
}

inline Floats Some(const void* x, Type type, int64_t first, int64_t count) {
  if (type == Type::kF32) return Some(static_cast<const float*>(x) + first, count);
  if (type == Type::kF16) return Some(static_cast<const Float16*>(x) + first, count);
  return Some(static_cast<const BFloat16*>(x) + first, count);
}

template <typename Number>
inline void Widen(const Number* from, int64_t count, float* out) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const Floats floats = Some(from + i, count - i);
    memcpy(out + i, &floats, Least(count - i, kLanes) * sizeof *out);
  }
}

inline void Widen(const void* x, Type type, int64_t first, int64_t count, float* out) {
  if (type == Type::kF32) return Widen(static_cast<const float*>(x) + first, count, out);
  if (type == Type::kF16) return Widen(static_cast<const Float16*>(x) + first, count, out);
  Widen(static_cast<const BFloat16*>(x) + first, count, out);
}

// Floats as numbers of other types, rounded to the nearest, ties to even.

inline BFloat16 ToBF16(float x) {
  const uint32_t bits = Cast<uint32_t>(x);
  return {static_cast<uint16_t>(x != x ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

inline Float16 ToF16(float x) {
  const uint32_t bits = Cast<uint32_t>(x), sign = bits >> 16 & 0x8000;
  const float size = Cast<float>(bits & 0x7fffffff);
  if (x != x) return {static_cast<uint16_t>(sign | 0x7e00)};
  if (size >= 65520) return {static_cast<uint16_t>(sign | 0x7c00)};
  // Below 2^-14 all have the same spacing, so adding 2^-1 leaves just the bits that are kept.
  if (size < 0x1p-14f) return {static_cast<uint16_t>(sign | (Cast<uint32_t>(size + 0.5f) - Cast<uint32_t>(0.5f)))};
  const uint32_t rest = Cast<uint32_t>(size * 0x1p-112f);
  return {static_cast<uint16_t>(sign | ((rest + 0xfff + (rest >> 13 & 1)) >> 13))};
}

// Stores kLanes numbers.
inline void Put(Floats x, float* to) { memcpy(to, &x, sizeof x); }
inline void Put(Floats x, BFloat16* to) {
#if defined(__AVX512BF16__)
  const auto halves = _mm512_cvtneps_pbh(Cast<__m512>(x));
  memcpy(to, &halves, sizeof halves);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  const bfloat16x4_t halves = vcvt_bf16_f32(Cast<float32x4_t>(x));
  memcpy(to, &halves, sizeof halves);
#else
  for (int lane = 0; lane < kLanes; ++lane) to[lane] = ToBF16(x[lane]);
#endif
}
inline void Put(Floats x, Float16* to) {
#if defined(__AVX512F__)
  const __m256i halves = _mm512_cvtps_ph(Cast<__m512>(x), 0);
  memcpy(to, &halves, sizeof halves);
#elif defined(__F16C__)
  const __m128i halves = _mm256_cvtps_ph(Cast<__m256>(x), 0);
  memcpy(to, &halves, sizeof halves);
#elif defined(__aarch64__)
  const float16x4_t halves = vcvt_f16_f32(Cast<float32x4_t>(x));
  memcpy(to, &halves, sizeof halves);
#else
  for (int lane = 0; lane < kLanes; ++lane) to[lane] = ToF16(x[lane]);
#endif
}

// Stores integers that fit into fewer bits.
inline void Put(Ints x, int16_t* to) {
#if defined(__AVX512F__)
  const __m256i narrow = _mm512_cvtepi32_epi16(Cast<__m512i>(x));
  memcpy(to, &narrow, sizeof narrow);
#elif defined(__aarch64__)
  const int16x4_t narrow = vmovn_s32(Cast<int32x4_t>(x));
  memcpy(to, &narrow, sizeof narrow);
#else
  for (int lane = 0; lane < kLanes; ++lane) to[lane] = static_cast<int16_t>(x[lane]);
#endif
}
inline void Put(Ints x, int8_t* to) {
#if defined(__AVX512F__)
  const __m128i narrow = _mm512_cvtepi32_epi8(Cast<__m512i>(x));
  memcpy(to, &narrow, sizeof narrow);
#elif defined(__aarch64__)
  const int16x4_t halves = vmovn_s32(Cast<int32x4_t>(x));
  const int8x8_t narrow = vmovn_s16(vcombine_s16(halves, halves));
  memcpy(to, &narrow, kLanes);
#else
  for (int lane = 0; lane < kLanes; ++lane) to[lane] = static_cast<int8_t>(x[lane]);
#endif
}

// Stores up to kLanes numbers.
template <typename Number>
inline void PutSome(Floats x, int64_t count, Number* to) {
  if (count >= kLanes) return Put(x, to);
  Number all[kLanes];
  Put(x, all);
  memcpy(to, all, count * sizeof *to);
}

inline void PutSome(Floats x, Type type, int64_t count, void* to, int64_t first) {
  if (type == Type::kF32) return PutSome(x, count, static_cast<float*>(to) + first);
  if (type == Type::kF16) return PutSome(x, count, static_cast<Float16*>(to) + first);
  PutSome(x, count, static_cast<BFloat16*>(to) + first);
}

inline void Narrow(const float* x, Type type, int64_t count, void* out, int64_t first) {
  for (int64_t i = 0; i < count; i += kLanes) PutSome(Some(x + i, count - i), type, count - i, out, first + i);
}

// exp(x), with a relative error below 2e-7, and 0 where the result is below the smallest normal number.
inline Floats Exp(Floats x) {
  x = x > 88 ? Floats{} + 88 : x;
  const Ints whole = Rounded(x * 1.44269504f);  // 1 / ln 2
  const Floats turns = __builtin_convertvector(whole, Floats);
  const Floats r = (x - turns * 0.693359375f) + turns * 2.12194440e-4f;  // ln 2 in two parts, the first one short
  // The polynomial with the smallest error, by Remez, with its last two coefficients fixed.
  constexpr float kFactors[] = {1.38368353e-3f, 8.37482419e-3f, 4.16682251e-2f, 0.166664198f, 0.499999911f, 1};
  Floats power = Floats{} + kFactors[0];
  UNROLL for (int i = 1; i < 6; ++i) power = power * r + kFactors[i];
  power = power * r + 1;
  return x < -87 ? Floats{} : power * Cast<Floats>((whole + 127) << 23);
}

}  // namespace
}  // namespace neuronx::NEURONX_LEVEL
