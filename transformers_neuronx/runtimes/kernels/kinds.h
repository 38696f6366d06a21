// Kinds of weights, and how they are multiplied.
//
// Weights are stored in panels of kPanel outputs: the first word of each output, then the second word of each, and so
// on. A word holds a few adjacent inputs of an output. A vector of words is split into PARTS vectors. Each is
// multiplied with the same 32 bits of activations, PER_PART inputs, in every lane. So each lane sums one output, and
// nothing is added across lanes.
//
// Activations are prepared once for all outputs: 32 bits for each part of each word.
#pragma once

#include "lanes.h"

namespace neuronx::NEURONX_LEVEL {
namespace {

// sums + products of shorts. The products of two neighbours are added.
inline Ints AddProducts(Ints sums, Shorts a, Shorts b) {
#if defined(__AVX512VNNI__)
  return Cast<Ints>(_mm512_dpwssd_epi32(Cast<__m512i>(sums), Cast<__m512i>(a), Cast<__m512i>(b)));
#elif defined(__AVX512BW__)
  return sums + Cast<Ints>(_mm512_madd_epi16(Cast<__m512i>(a), Cast<__m512i>(b)));
#elif defined(__AVX2__)
  return sums + Cast<Ints>(_mm256_madd_epi16(Cast<__m256i>(a), Cast<__m256i>(b)));
#elif defined(__SSE2__)
  return sums + Cast<Ints>(_mm_madd_epi16(Cast<__m128i>(a), Cast<__m128i>(b)));
#elif defined(__aarch64__)
  const int16x8_t x = Cast<int16x8_t>(a), y = Cast<int16x8_t>(b);
  return sums + Cast<Ints>(vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_high_s16(x, y)));
#else
  for (int lane = 0; lane < kLanes; ++lane)
    sums[lane] += int32_t{a[2 * lane]} * b[2 * lane] + int32_t{a[2 * lane + 1]} * b[2 * lane + 1];
  return sums;
#endif
}

// Whether products of bf16 vectors are faster than those of floats. Processors with AMX use its tiles instead.
#if (defined(__AVX512BF16__) && !defined(__AMX_BF16__)) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
constexpr bool kPairsPay = true;
#else
constexpr bool kPairsPay = false;
#endif

// Activations as floats. Members of every kind:
//   BYTES    size of a word, or of the WORDS of four bytes that belong together and are read in STEPS
//   RUN      words that are summed before their sum is added to the total, if groups do not determine it: few enough
//            for small errors, or none, and enough to make totals cheap
//   OFFSET   parts are weights plus OFFSET; sums start lower to compensate
//   LEAST    the value that stands for a group's minimum
//   ROUNDED  whether activations are rounded, and each run has its own factor
//   MATRIX   whether `AddMatrix` multiplies two rows of activations with two outputs, with 64 bits of each
//   MOST     the largest integer that activations are rounded to
//   SPLIT    whether these have two bytes, which are multiplied one after the other
struct Single {
  static constexpr bool ROUNDED = false, MATRIX = false, SPLIT = false;
  using Active = float;
  using Sums = Floats;
  using Vector = Floats;
  static constexpr int PARTS = 1, PER_PART = 1, BYTES = 4, WORDS = 1, STEPS = 1, RUN = 64, OFFSET = 0, LEAST = 0;
  static Vector Repeat(const int32_t* x) { return Cast<Floats>(Ints{} + Load<int32_t>(x)); }
  static Sums Add(Sums sums, Vector w, Vector x) { return sums + w * x; }
};

struct F32 : Single {
  using Words = Floats;
  static Words Read(const char* at) { return Load<Words>(at); }
  template <int PART>
  static Vector Part(Words w) { return w; }
};

struct F16 : F32 {
  static constexpr int BYTES = 2;
  static Words Read(const char* at) { return Widened(reinterpret_cast<const Float16*>(at)); }
};

#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#if defined(__AVX512BF16__)
using Pairs = __m512bh;
#else
using Pairs = bfloat16x8_t;
#endif

struct BF16 {
  static constexpr bool ROUNDED = false, SPLIT = false;
#if defined(__AVX512BF16__)
  static constexpr bool MATRIX = false;
#else
  static constexpr bool MATRIX = true;
  static Floats AddMatrix(Floats sums, Pairs w, Pairs x) {
    return Cast<Floats>(vbfmmlaq_f32(Cast<float32x4_t>(sums), x, w));
  }
#endif
  using Active = BFloat16;
  using Sums = Floats;
  using Vector = Pairs;
  using Words = Pairs;
  static constexpr int PARTS = 1, PER_PART = 2, BYTES = 4, WORDS = 1, STEPS = 1, RUN = 64, OFFSET = 0, LEAST = 0;
  static Words Read(const char* at) { return Load<Words>(at); }
  template <int PART>
  static Vector Part(Words w) { return w; }
  static Vector Repeat(const int32_t* x) { return Cast<Vector>(Ints{} + Load<int32_t>(x)); }
  static Sums Add(Sums sums, Vector w, Vector x) {
#if defined(__AVX512BF16__)
    return Cast<Floats>(_mm512_dpbf16_ps(Cast<__m512>(sums), w, x));
#else
    return Cast<Floats>(vbfdotq_f32(Cast<float32x4_t>(sums), w, x));
#endif
  }
  // The words of two inputs: rounded to bf16, or of inputs that are exact in bf16.
  static Floats Joined(Floats first, Floats second) { return Cast<Floats>(Half(first) | Half(second) << 16); }
  static Floats JoinedExactly(Floats first, Floats second) {
    return Cast<Floats>(Cast<UInts>(first) >> 16 | Cast<UInts>(second));
  }
  static UInts Half(Floats x) {
#if defined(__AVX512BF16__)
    return Cast<UInts>(_mm512_cvtepu16_epi32(Cast<__m256i>(_mm512_cvtneps_pbh(Cast<__m512>(x)))));
#else
    return Cast<UInts>(vmovl_u16(Cast<uint16x4_t>(vcvt_bf16_f32(Cast<float32x4_t>(x)))));
#endif
  }
};
#else
struct BF16 : Single {
  static constexpr int PARTS = 2;
  using Words = Ints;
  static Words Read(const char* at) { return Load<Words>(at); }
  template <int PART>
  static Vector Part(Words w) { return Cast<Floats>(PART ? w & ~0xffff : w << 16); }
};
#endif

// Integer weights as floats, which is exact. A byte of s4 has one of the word's first four inputs in its low bits, and
// one of the other four in its high bits.
struct WideS8 : Single {
  static constexpr int PARTS = 4, RUN = 16;  // a word's products depend on each other, the next run does not
  using Words = Ints;
  static Words Read(const char* at) { return Load<Words>(at); }
  template <int PART>
  static Vector Part(Words w) { return AsFloats(w << (24 - 8 * PART) >> 24); }
};

struct WideS4 : WideS8 {
  static constexpr int PARTS = 8, LEAST = -8;
  template <int PART>
  static Vector Part(Words w) { return AsFloats(w << (28 - 8 * (PART % 4) - PART / 4 * 4) >> 28); }
};

// Numbers of 4 + HIGH bits, s5 and s6, plus half of their range. After some words of their low bits, each as of s4, is a
// word of the high bits. From its lowest bits on, a byte of it has those of the inputs with low bits at its place: in the
// first word's low halves, its high halves, the second word's low halves, and so on.
template <int HIGH>
struct Planes {
  static constexpr int kLow = 4 / HIGH, kHalf = 8 << HIGH, kMask = ((1 << HIGH) - 1) << 4;
  // The low bits of a step, and from the lowest bits of each byte on, its high bits, with others above.
  struct Words { UInts low, high; };
  static Words Read(const char* at, int step) {
    constexpr int kWord = kPanel * 4;
    return {Load<UInts>(at + step * kWord), Load<UInts>(at + kLow * kWord) >> (2 * HIGH * step)};
  }
  // Bits from place `from` on at place 4, with others around.
  template <typename Vector>
  static Vector AtFour(Vector bits, int from) { return from < 4 ? bits << (4 - from) : bits >> (from - 4); }
};

template <int HIGH>
struct WidePlanes : Single, Planes<HIGH> {
  using P = Planes<HIGH>;
  using Words = typename P::Words;
  using P::Read;
  static constexpr int STEPS = P::kLow, PARTS = 8, WORDS = STEPS + 1, BYTES = 4 * WORDS, RUN = 1, LEAST = -P::kHalf;
  template <int PART>
  static Vector Part(const Words& w) {
    constexpr int byte = 8 * (PART % 4), half = PART / 4;
    const UInts low = w.low >> (byte + 4 * half) & 15, high = P::AtFour(w.high, byte + HIGH * half) & P::kMask;
    return AsFloats(Cast<Ints>(low | high) - P::kHalf);
  }
};

template <typename Integer>
int32_t SumOf(const Integer* x, int64_t count) {
  int32_t sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += x[i];
  return sum;
}

constexpr int kMostOfTwo = 127 * 256 + 127;  // the largest integer of two bytes that both are signed
constexpr int64_t kSplit = 8;                // inputs whose high bytes are neighbours, and then their low ones

// Activations as 16-bit integers, so that sums are integers, and exact. Those of a word are in the ORDER of its parts.
struct Whole {
  static constexpr bool ROUNDED = false, MATRIX = false, SPLIT = false;
  using Active = int16_t;
  using Sums = Ints;
  using Vector = Shorts;
  using Words = Shorts;
  static constexpr int PER_PART = 2, BYTES = 4, WORDS = 1, STEPS = 1, MOST = kMostOfTwo;
  static constexpr int RUN = 64;  // times four inputs, 255 and MOST is below 2^31
  static Words Read(const char* at) { return Load<Words>(at); }
  static Vector Repeat(const int32_t* x) { return Cast<Shorts>(Ints{} + Load<int32_t>(x)); }
  static Sums Add(Sums sums, Vector w, Vector x) { return AddProducts(sums, w, x); }
  static void Set(int16_t* active, int64_t i, int16_t x) { active[i] = x; }
  static int32_t Sum(const int16_t* active, int64_t first, int64_t past) { return SumOf(active + first, past - first); }
};

struct S8 : Whole {
  static constexpr int PARTS = 2, OFFSET = 0, LEAST = 0, ORDER[] = {0, 2, 1, 3};
  template <int PART>
  static Vector Part(Words w) { return (PART ? w : w << 8) >> 8; }
};

struct S4 : Whole {
  static constexpr int PARTS = 4, OFFSET = 8, LEAST = -8, ORDER[] = {0, 2, 4, 6, 1, 3, 5, 7};
  static Words Read(const char* at) { return Load<Words>(at) ^ static_cast<int16_t>(0x8888); }
  template <int PART>
  static Vector Part(Words w) { return Cast<Vector>(Cast<UShorts>(w) >> 4 * PART & 15); }
};

template <int HIGH>
struct WholePlanes : Whole, Planes<HIGH> {
  using P = Planes<HIGH>;
  using Words = typename P::Words;
  using P::Read;
  static constexpr int STEPS = P::kLow, PARTS = 4, WORDS = STEPS + 1, BYTES = 4 * WORDS, RUN = 1;
  static constexpr int OFFSET = P::kHalf, LEAST = -P::kHalf;
  struct Order { constexpr int64_t operator[](int64_t i) const { return i / 8 * 8 + S4::ORDER[i % 8]; } };
  static constexpr Order ORDER = {};
  template <int PART>
  static Vector Part(const Words& w) {
    constexpr int byte = PART / 2 * 8, half = PART % 2;
    const UShorts high = P::AtFour(Cast<UShorts>(w.high), byte + HIGH * half) & P::kMask;
    return Cast<Vector>((Cast<UShorts>(w.low) >> 4 * PART & 15) | high);
  }
};

#if defined(__AVX512VNNI__) || defined(__ARM_FEATURE_DOTPROD)
// sums + products of bytes, the first ones from 0 to 255, or on ARM from -128 to 127. The products of four neighbours are
// added.
inline Ints AddProducts(Ints sums, UBytes a, Bytes b) {
#if defined(__AVX512VNNI__)
  return Cast<Ints>(_mm512_dpbusd_epi32(Cast<__m512i>(sums), Cast<__m512i>(a), Cast<__m512i>(b)));
#else
  return Cast<Ints>(vdotq_s32(Cast<int32x4_t>(sums), Cast<int8x16_t>(a), Cast<int8x16_t>(b)));
#endif
}

// Activations as 8-bit integers.
struct Byte {
  static constexpr bool ROUNDED = true, SPLIT = false;
#if defined(__ARM_FEATURE_MATMUL_INT8)
  static constexpr bool MATRIX = true;
  static Ints AddMatrix(Ints sums, UBytes w, Bytes x) {
    return Cast<Ints>(vmmlaq_s32(Cast<int32x4_t>(sums), Cast<int8x16_t>(x), Cast<int8x16_t>(w)));
  }
#else
  static constexpr bool MATRIX = false;
#endif
  using Active = int8_t;
  using Sums = Ints;
  using Vector = UBytes;
  using Words = UBytes;
  static constexpr int PER_PART = 4, BYTES = 4, WORDS = 1, STEPS = 1, MOST = 127, RUN = 64;
  static Bytes Repeat(const int32_t* x) { return Cast<Bytes>(Ints{} + Load<int32_t>(x)); }
  static Sums Add(Sums sums, Vector w, Bytes x) { return AddProducts(sums, w, x); }
  static void Set(int8_t* active, int64_t i, int16_t x) { active[i] = static_cast<int8_t>(x); }
  static int32_t Sum(const int8_t* active, int64_t first, int64_t past) { return SumOf(active + first, past - first); }
};

struct ByteS8 : Byte {
#if defined(__AVX512VNNI__)
  static constexpr int OFFSET = 128;
#else
  static constexpr int OFFSET = 0;
#endif
  static constexpr int PARTS = 1, LEAST = 0, ORDER[] = {0, 1, 2, 3};
  static Words Read(const char* at) { return Load<Words>(at) ^ uint8_t{OFFSET}; }
  template <int PART>
  static Vector Part(Words w) { return w; }
};

struct ByteS4 : Byte {
  static constexpr int PARTS = 2, OFFSET = 8, LEAST = -8, ORDER[] = {0, 1, 2, 3, 4, 5, 6, 7};
  static Words Read(const char* at) { return Load<Words>(at) ^ uint8_t{0x88}; }
  template <int PART>
  static Vector Part(Words w) { return PART ? Cast<Vector>(Cast<UShorts>(w) >> 4) & 15 : w & 15; }
};

template <int HIGH>
struct BytePlanes : Byte, Planes<HIGH> {
  static constexpr bool MATRIX = false;
  using P = Planes<HIGH>;
  using Words = typename P::Words;
  using P::Read;
  static constexpr int STEPS = P::kLow, PARTS = 2, WORDS = STEPS + 1, BYTES = 4 * WORDS, RUN = 1;
  static constexpr int OFFSET = P::kHalf, LEAST = -P::kHalf;
  struct Order { constexpr int64_t operator[](int64_t i) const { return i; } };
  static constexpr Order ORDER = {};
  template <int PART>
  static Vector Part(const Words& w) {
    const UShorts high = P::AtFour(Cast<UShorts>(w.high), HIGH * PART);
    return ByteS4::Part<PART>(Cast<Vector>(w.low)) | (Cast<Vector>(high) & static_cast<uint8_t>(P::kMask));
  }
};
#else
template <int HIGH>
struct BytePlanes : WholePlanes<HIGH> { static constexpr bool ROUNDED = true; static constexpr int MOST = 127; };
struct ByteS8 : S8 { static constexpr bool ROUNDED = true; static constexpr int MOST = 127; };
struct ByteS4 : S4 { static constexpr bool ROUNDED = true; static constexpr int MOST = 127; };
#endif

// Activations as 16-bit integers in two bytes, 256 times the high one plus the low one, both signed: eight high ones of
// neighbouring inputs, then their low ones. With products of matrices, these are two rows.
#if defined(__AVX512VNNI__) || defined(__ARM_FEATURE_DOTPROD)
template <typename Bytewise>
struct SplitOf : Bytewise {
  static constexpr bool ROUNDED = false, SPLIT = true;
  static constexpr int MOST = kMostOfTwo;
  // Sets the elements from i on, the first of kSplit.
  static void Set(int8_t* active, int64_t i, const int16_t* x) {
    using Eight __attribute__((vector_size(16))) = int16_t;
    using Bytes __attribute__((vector_size(8))) = int8_t;
    const auto whole = Load<Eight>(x), low = (whole << 8) >> 8;
    const auto first = __builtin_convertvector((whole - low) >> 8, Bytes), last = __builtin_convertvector(low, Bytes);
    memcpy(active + 2 * i, &first, kSplit), memcpy(active + 2 * i + kSplit, &last, kSplit);
  }
  // `first` is the first of kSplit elements, and what is after the last element is zero, up to as many.
  static int32_t Sum(const int8_t* active, int64_t first, int64_t past) {
    int32_t high = 0, low = 0;
    for (int64_t i = 2 * first; i < 2 * past; i += 2 * kSplit)
      high += SumOf(active + i, kSplit), low += SumOf(active + i + kSplit, kSplit);
    return high * 256 + low;
  }
};
using SplitS8 = SplitOf<ByteS8>;
using SplitS4 = SplitOf<ByteS4>;
template <int HIGH>
using SplitPlanes = SplitOf<BytePlanes<HIGH>>;
#else
using SplitS8 = S8;
using SplitS4 = S4;
template <int HIGH>
using SplitPlanes = WholePlanes<HIGH>;
#endif

template <typename Kind>
constexpr int64_t kInputs = Kind::STEPS * Kind::PARTS * Kind::PER_PART;  // of a word

}  // namespace
}  // namespace neuronx::NEURONX_LEVEL
