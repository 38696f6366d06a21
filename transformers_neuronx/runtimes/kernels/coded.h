// Kinds of weights whose bits stand for floats: f8 (e4m3fn), and codes of four bits. Those of f8 and e2m1 are exact in
// bf16, so products are those of floats or of bf16.
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

// Codes of four bits, in bytes as s4 has them, and their numbers.
alignas(64) constexpr float kE2M1[] = {0, .5, 1, 1.5, 2, 3, 4, 6, -0.0f, -.5, -1, -1.5, -2, -3, -4, -6};
alignas(64) constexpr float kNF4[] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
    -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
    0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};
alignas(64) constexpr float kFP4[] = {0,     .0625f / 12,  8.f / 12,  1,  4.f / 12,  .5f,  2.f / 12,  .25f,
                                      -0.0f, -.0625f / 12, -8.f / 12, -1, -4.f / 12, -.5f, -2.f / 12, -.25f};

// The numbers of the codes in the lowest bits.
inline Floats LookedUp(Ints codes, const float (&table)[16]) {
#if defined(__AVX512F__)
  return Cast<Floats>(_mm512_permutexvar_ps(Cast<__m512i>(codes), Load<__m512>(table)));
#elif defined(__AVX2__)
  const __m256i index = Cast<__m256i>(codes);  // of which three bits count
  const __m256 first = _mm256_permutevar8x32_ps(Load<__m256>(table), index);
  const __m256 last = _mm256_permutevar8x32_ps(Load<__m256>(table + 8), index);
  return Cast<Floats>(_mm256_blendv_ps(first, last, Cast<__m256>(codes << 28)));
#elif defined(__aarch64__)
  const Ints bytes = (codes & 15) * 0x04040404 + 0x03020100;  // the places of each float's bytes
  return Cast<Floats>(vqtbl4q_u8(Load<uint8x16x4_t>(table), Cast<uint8x16_t>(bytes)));
#else
  Floats floats;
  for (int lane = 0; lane < kLanes; ++lane) floats[lane] = table[codes[lane] & 15];
  return floats;
#endif
}

template <const float (&TABLE)[16]>
struct WideCodes : WideS4 {
  static constexpr int LEAST = 0;  // not used
  template <int PART>
  static Vector Part(Words w) { return LookedUp(w >> (8 * (PART % 4) + PART / 4 * 4), TABLE); }
};
using WideE2M1 = WideCodes<kE2M1>;
using WideNF4 = WideCodes<kNF4>;
using WideFP4 = WideCodes<kFP4>;

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

struct E2M1 : BF16 {
  static constexpr int PARTS = 4, RUN = 16;
  using Words = Shorts;
  static Words Read(const char* at) { return Read0213(at); }
  template <int PART>
  static Vector Part(Words w) {
    alignas(64) static constexpr uint16_t kBits[] = {
        0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
        0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};
    const __m512i twice = _mm512_broadcast_i64x4(Load<__m256i>(kBits));  // four of an index's five bits count
    const __m512i index = Cast<__m512i>(Cast<UShorts>(w) >> (8 * (PART % 2) + PART / 2 * 4));
    return Cast<Vector>(_mm512_permutexvar_epi16(index, twice));
  }
};
#else
using F8 = WideF8;
using E2M1 = WideE2M1;
#endif

}  // namespace
}  // namespace neuronx::NEURONX_LEVEL
