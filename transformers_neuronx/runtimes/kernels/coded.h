// Kinds of weights whose bits stand for floats: f8 (e4m3fn). All of them are exact in bf16, so products are those of
// floats or of bf16.
//
// No step computes with small floats: processors that take subnormal numbers for zeros would lose those of f8.
#pragma once

#include "kinds.h"

namespace neuronx::NEURONX_LEVEL {
namespace {

// The bf16 of an f8 without its sign.
constexpr int BitsOfF8(int code) {
  if (code == 127) return 0x7fc0;  // NaN
  if (code == 0 || code > 7) return code ? (code << 4) + 0x3c00 : 0;
  const int top = code > 3 ? 2 : code > 1;  // subnormal: the number of 2^-9
  return (118 + top) << 7 | (code << (7 - top) & 0x7f);
}

#if defined(__AVX512VBMI__)

struct TableOfF8 {
  alignas(64) uint8_t low[128] = {}, high[128] = {};
  constexpr TableOfF8() {
    for (int code = 0; code < 128; ++code) low[code] = BitsOfF8(code) & 255, high[code] = BitsOfF8(code) >> 8;
  }
};
constexpr TableOfF8 kTableOfF8;

// The low and the high bytes of bf16, in the places of f8.
struct F8Words { Shorts low, high; };

inline Shorts LookedUp(Shorts codes, const uint8_t (&table)[128]) {
  const auto first = Load<__m512i>(table), last = Load<__m512i>(table + 64);
  return Cast<Shorts>(_mm512_permutex2var_epi8(first, Cast<__m512i>(codes), last));
}

inline F8Words AsWords(Shorts w) {
  return {LookedUp(w, kTableOfF8.low), LookedUp(w, kTableOfF8.high) | (w & static_cast<int16_t>(0x8080))};
}

// The f8 in the low bytes of halves, or in the high ones, as bf16.
template <bool HIGH>
inline Shorts AsBF16(F8Words w) {
  constexpr auto kHigh = static_cast<int16_t>(0xff00);
  return HIGH ? Cast<Shorts>(Cast<UShorts>(w.low) >> 8) | (w.high & kHigh) : (w.low & 0xff) | w.high << 8;
}

#else

using F8Words = Shorts;
inline F8Words AsWords(Shorts w) { return w; }

template <bool HIGH>
inline Shorts AsBF16(F8Words w) {
  w = HIGH ? w : w << 8;
  const Shorts size = Cast<Shorts>(Cast<UShorts>(w) >> 4) & 0x7f0;  // where a bf16 has them, but with another bias
  const Shorts normal = size + 0x3c00, sign = w & static_cast<int16_t>(0x8000);
#if defined(__AVX512BW__)
  // By the last five bits: the subnormal numbers, and NaN at the end.
  alignas(64) static constexpr int16_t kOthers[32] = {
      0, BitsOfF8(1), BitsOfF8(2), BitsOfF8(3), BitsOfF8(4), BitsOfF8(5), BitsOfF8(6), BitsOfF8(7),
      0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, BitsOfF8(127)};
  const __m512i next = _mm512_add_epi16(_mm512_slli_epi16(Cast<__m512i>(w), 1), _mm512_set1_epi16(0x200));
  const __mmask32 others = _mm512_cmplt_epu16_mask(next, _mm512_set1_epi16(0x1200));  // below 8, or 127, which wraps
  const __m512i index = _mm512_srli_epi16(Cast<__m512i>(w), 8);
  return sign | Cast<Shorts>(_mm512_mask_permutexvar_epi16(Cast<__m512i>(normal), others, index, Load<__m512i>(kOthers)));
#else
  // The bits of floats as a function of subnormal numbers are pieces of lines, the least of which counts.
  const auto least = [](Shorts a, Shorts b) { return a < b ? a : b; };
  const Shorts small = least(least(size * 2 + 0x3b80, size * 4 + 0x3b00), size * 8 + 0x3a80);
  return sign | (least(normal, small) & (size != 0)) | (size == 0x7f0);
#endif
}

#endif

// A word has four inputs.
struct WideF8 : WideS8 {
  using Words = F8Words;
  static Words Read(const char* at) { return AsWords(Load<Shorts>(at)); }
  template <int PART>
  static Vector Part(Words w) {
    const Ints pair = Cast<Ints>(AsBF16<PART % 2>(w));
    return Cast<Floats>(PART < 2 ? pair << 16 : pair & ~0xffff);
  }
};

#if defined(__AVX512BF16__)
// The two bytes in the middle of a word change places, so that its parts have two neighbouring inputs.
inline Shorts Read0213(const char* at) {
  const __m512i order = _mm512_set4_epi32(0x0f0d0e0c, 0x0b090a08, 0x07050604, 0x03010200);
  return Cast<Shorts>(_mm512_shuffle_epi8(Load<__m512i>(at), order));
}

struct F8 : BF16 {
  static constexpr int PARTS = 2, RUN = 32;
  using Words = F8Words;
  static Words Read(const char* at) { return AsWords(Read0213(at)); }
  template <int PART>
  static Vector Part(Words w) { return Cast<Vector>(AsBF16<PART>(w)); }
};
#else
using F8 = WideF8;
#endif

}  // namespace
}  // namespace neuronx::NEURONX_LEVEL
