// The products that linear layers are made of.
//
// A Kind says how weights and activations are stored, and adds the products of STEP of each to a vector of sums. Weights
// are read as they lie in memory; activations are prepared once for all rows of the weight.
#pragma once

#include <type_traits>

#include "vectors.h"

namespace neuronx::NEURONX_LEVEL {
namespace {

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

// sums + products of numbers up to 15 and bytes, each of four neighbours added.
inline Ints AddProducts(Ints sums, Nibbles a, Bytes b) {
#if defined(__AVX512VNNI__)
  return Cast<Ints>(_mm512_dpbusd_epi32(Cast<__m512i>(sums), Cast<__m512i>(a), Cast<__m512i>(b)));
#elif defined(__AVX512BW__)
  const __m512i pairs = _mm512_maddubs_epi16(Cast<__m512i>(a), Cast<__m512i>(b));
  return sums + Cast<Ints>(_mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
#elif defined(__AVX2__)
  const __m256i pairs = _mm256_maddubs_epi16(Cast<__m256i>(a), Cast<__m256i>(b));
  return sums + Cast<Ints>(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#else
  typedef int16_t Pairs __attribute__((vector_size(kLanes * 4)));
  const Pairs x = Cast<Pairs>(a), y = Cast<Pairs>(b);  // x is of nibbles, so its halves have no sign
  const Pairs sum = (x & 0xff) * (y << 8 >> 8) + (x >> 8) * (y >> 8);
  return sums + (Cast<Ints>(sum) << 16 >> 16) + (Cast<Ints>(sum) >> 16);
#endif
}

// Kinds. RUN is how many steps sums can take before they have to become floats, PACKED the inputs in one Weight, and
// Stride the length of a prepared row.
struct F32 {
  using Weight = float;
  using Active = float;
  using Sums = Floats;
  using Vector = Floats;
  static constexpr int64_t STEP = kLanes, RUN = int64_t{1} << 40, PACKED = 1;
  static int64_t Stride(int64_t inputs) { return RoundUp(inputs, STEP); }
  static Vector LoadWeight(const Weight* w) { return Load<Floats>(w); }
  static Vector LoadActive(const Active* x) { return Load<Floats>(x); }
  static Vector Repeat(const Active* x) { return Floats{} + *x; }
  static Sums Add(Sums sums, Vector w, Vector x) { return sums + w * x; }
};

struct F16 : F32 {
  using Weight = Float16;
  static Vector LoadWeight(const Weight* w) { return Widened(w); }
};

#if defined(__AVX512BF16__)
struct BF16 {
  using Weight = BFloat16;
  using Active = BFloat16;
  using Sums = Floats;
  using Vector = __m512bh;
  static constexpr int64_t STEP = 2 * kLanes, RUN = int64_t{1} << 40, PACKED = 1;
  static int64_t Stride(int64_t inputs) { return RoundUp(inputs, STEP); }
  static Vector LoadWeight(const Weight* w) { return Load<Vector>(w); }
  static Vector LoadActive(const Active* x) { return Load<Vector>(x); }
  static Vector Repeat(const Active* x) { return Cast<Vector>(_mm512_set1_epi32(Load<int32_t>(x))); }
  static Sums Add(Sums sums, Vector w, Vector x) {
    return Cast<Floats>(_mm512_dpbf16_ps(Cast<__m512>(sums), w, x));
  }
};
#else
struct BF16 : F32 {
  using Weight = BFloat16;
  static Vector LoadWeight(const Weight* w) { return Widened(w); }
};
#endif

// What bf16 is multiplied as: as it is, where the processor does that.
using Halves = std::conditional_t<sizeof(BF16::Active) == 2, BF16, F32>;

// Weights in integers go with activations in integers of 16 bits, so that sums are whole numbers, and exact. They are
// prepared BLOCK at a time. What the largest becomes is LARGEST.
constexpr int64_t BLOCK = 16;

struct S8 {
  using Weight = int8_t;
  using Active = int16_t;
  using Sums = Ints;
  using Vector = Shorts;
  static constexpr int64_t STEP = 2 * kLanes, PACKED = 1, RUN = 128;  // times 2 * 128 * 32767 is below 2^31
  static constexpr int32_t LARGEST = 32767;
  static int64_t Stride(int64_t inputs) { return RoundUp(inputs, 2 * BLOCK); }
  static void Store(const int32_t* block, int64_t input, int64_t, Active* out) {
    for (int64_t i = 0; i < BLOCK; ++i) out[input + i] = static_cast<int16_t>(block[i]);
  }
  static void Finish(Active*, int64_t) {}
  static Vector LoadWeight(const Weight* w) {
    typedef int8_t Half __attribute__((vector_size(kLanes * 2)));
    return __builtin_convertvector(Load<Half>(w), Shorts);
  }
  static Vector LoadActive(const Active* x) { return Load<Shorts>(x); }
  static Sums Add(Sums sums, Vector w, Vector x) { return AddProducts(sums, w, x); }
};

// Weights of 4 bits, two in a byte: of a group's inputs the first half in the low bits, the second half in the high
// ones. A step is BYTES of them. Its activations are five vectors: what is above 8 bits of those that go with low bits
// and with high bits, what is below, as 256 * above + below, and what the sums begin with, since the processor wants
// weights without a sign: they go as 0 to 15 in place of -8 to 7.
struct S4 {
  using Weight = uint8_t;
  using Active = int8_t;
  static constexpr int64_t BYTES = 4 * kLanes, STEP = 5 * BYTES, PACKED = 2;
  static constexpr int32_t LARGEST = 127 * 257;

  static int64_t Steps(int64_t inputs) { return RoundUp(inputs / 2, BYTES) / BYTES; }
  static int64_t Stride(int64_t inputs) { return Steps(inputs) * STEP; }

  static void Store(const int32_t* block, int64_t input, int64_t group, Active* out) {
    const int64_t inside = input % group, half = group / 2, byte = input / group * half + inside % half;
    Active* above = out + byte / BYTES * STEP + (inside < half ? 0 : BYTES) + byte % BYTES;
    for (int64_t i = 0; i < BLOCK; ++i) {
      const int32_t high = (block[i] + 128) >> 8;
      above[i] = static_cast<int8_t>(high);
      above[i + 2 * BYTES] = static_cast<int8_t>(block[i] - 256 * high);
    }
  }

  static void Finish(Active* out, int64_t inputs) {
    const Nibbles one = Nibbles{} + 1;
    for (int64_t step = 0; step < Steps(inputs); ++step) {
      const Step x(out + step * STEP);
      const Ints above = AddProducts(AddProducts(Ints{}, one, x.low_above), one, x.high_above);
      const Ints below = AddProducts(AddProducts(Ints{}, one, x.low_below), one, x.high_below);
      const Ints begin = ((above << 8) + below) * -8;
      memcpy(out + step * STEP + 4 * BYTES, &begin, sizeof begin);
    }
  }

  struct Step {
    Bytes low_above, high_above, low_below, high_below;
    Ints begin;
    explicit Step(const Active* x)
        : low_above(Load<Bytes>(x)), high_above(Load<Bytes>(x + BYTES)), low_below(Load<Bytes>(x + 2 * BYTES)),
          high_below(Load<Bytes>(x + 3 * BYTES)), begin(Load<Ints>(x + 4 * BYTES)) {}

    Floats Times(Nibbles low, Nibbles high) const {
      const Ints above = AddProducts(AddProducts(Ints{}, low, low_above), high, high_above);
      const Ints below = AddProducts(AddProducts(begin, low, low_below), high, high_below);
      return __builtin_convertvector((above << 8) + below, Floats);
    }
  };

  // The scales of a step's groups, as its sums lie: four of those go with 16 bytes. There are four groups at most.
  struct Scales {
    int64_t groups;
    int shift;   // bytes to groups
    uint8_t all;  // a bit for each group of a step
    Bytes index;  // of the bytes of four scales those that each sum gets, behind two zeros: so bf16 is a float

    Scales(int64_t inputs, int64_t group) : groups(inputs / group), shift(__builtin_ctzll(group / 2)) {
      all = static_cast<uint8_t>((1 << (BYTES >> shift > 1 ? BYTES >> shift : 1)) - 1);
      for (int lane = 0; lane < kLanes; ++lane) {
        const int8_t own = static_cast<int8_t>(2 * (4 * lane >> shift)), wanted[] = {-1, -1, own, static_cast<int8_t>(own + 1)};
        memcpy(reinterpret_cast<int8_t*>(&index) + 4 * lane, wanted, sizeof wanted);
      }
    }

    // Of the step; WHOLE, if there are inputs for all of it.
    template <bool WHOLE>
    Floats Of(const BFloat16* scale, int64_t step) const {
      const int64_t first = step * BYTES >> shift;
#if defined(__AVX512BW__)
      const __mmask8 there = WHOLE ? all : (1 << Least(groups - first, 4)) - 1;
      const __m512i four = _mm512_broadcastq_epi64(_mm_maskz_loadu_epi16(there, scale + first));
      return Cast<Floats>(_mm512_shuffle_epi8(four, Cast<__m512i>(index)));
#elif defined(__AVX2__)
      const bool four = first + 4 <= groups;
      const int64_t bits = four ? Load<int64_t>(scale + first) : LoadPart<int64_t>(scale + first, groups - first);
      return Cast<Floats>(_mm256_shuffle_epi8(_mm256_set1_epi64x(bits), Cast<__m256i>(index)));
#else
      static_assert(BYTES == 16);  // half of the smallest group
      return Floats{} + AsFloat(scale[first]);
#endif
    }
  };
};

}  // namespace
}  // namespace neuronx::NEURONX_LEVEL
