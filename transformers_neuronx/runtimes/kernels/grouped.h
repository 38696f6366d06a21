// Linear layers in tiles with weights of up to 8 bits, and most often scales of groups. Weights are widened to bf16, which is
// exact, once for up to 256 rows of activations in bf16. The sums of each group are scaled in f32 and added in vectors.
#pragma once

#include "activations.h"
#include "coded.h"
#include "tiling.h"

#if defined(__AMX_BF16__)
namespace neuronx::NEURONX_LEVEL {
namespace {

constexpr int kFewestOfHalves = 13;  // or FEWEST if that is more, with half a tile of inputs: products take twice as long

// Numbers from `least` on, as many as there are lanes.
inline __m512i HalvesFrom(float least) {
  const Floats low = AsFloats(Count()) + least, high = low + static_cast<float>(kLanes);
  return Cast<__m512i>(_mm512_cvtne2ps_pbh(Cast<__m512>(high), Cast<__m512>(low)));
}

// Kinds of weights. A word of WORDS lines has inputs in the order of its parts, and each part, two inputs of each output, is
// a line of a tile. LEAST is as in kinds.h. Widening pays for FEWEST rows or more.
struct TiledS4 {
  using Words = UShorts;
  static constexpr int WORDS = 1, STEPS = 1, LEAST = -8, FEWEST = 9;
  __m512i numbers = _mm512_broadcast_i64x4(Cast<__m256i>(_mm512_cvtneps_pbh(Cast<__m512>(AsFloats(Count() << 28 >> 28)))));

  static Words Read(const char* at, int) { return Load<Words>(at); }
  template <int PART>
  __m512i Line(Words w) const { return _mm512_permutexvar_epi16(Cast<__m512i>(w >> 4 * PART), numbers); }
};

struct TiledE2M1 : TiledS4 {
  static constexpr int LEAST = 0, FEWEST = 3;  // the first is not used
  TiledE2M1() { numbers = _mm512_broadcast_i64x4(Cast<__m256i>(_mm512_cvtneps_pbh(Load<__m512>(kE2M1)))); }
};

struct TiledS5 : WholePlanes<1> {
  static constexpr int FEWEST = 9;
  __m512i numbers = HalvesFrom(LEAST);
  template <int PART>
  __m512i Line(const Words& w) const { return _mm512_permutexvar_epi16(Cast<__m512i>(WholePlanes::Part<PART>(w)), numbers); }
};

struct TiledS6 : WholePlanes<2> {
  static constexpr int FEWEST = 9;
  __m512i first = HalvesFrom(LEAST), last = HalvesFrom(0);
  template <int PART>
  __m512i Line(const Words& w) const {
    return _mm512_permutex2var_epi16(first, Cast<__m512i>(WholePlanes::Part<PART>(w)), last);
  }
};

// Words of four inputs, two by two.
struct WidenedS8 {
  static constexpr int WORDS = 2, STEPS = 1, LEAST = 0, FEWEST = 17;
  struct Words { Ints first, second; };

  static Words Read(const char* at, int) { return {Load<Ints>(at), Load<Ints>(at + kLineBytes)}; }
  // A byte of each word as a number in f32. Its high half is the number in bf16.
  template <int BYTE>
  static __m512i Number(Ints word) {
    return Cast<__m512i>(AsFloats(AddProducts(Ints{}, Cast<UBytes>(Ints{} + (1 << 8 * BYTE)), Cast<Bytes>(word))));
  }
  template <int PART>
  __m512i Line(const Words& w) const {
    const Ints word = PART % 2 ? w.second : w.first;
    const __m512i high_halves = _mm512_set4_epi32(0x0f0e, 0x0b0a, 0x0706, 0x0302);
    constexpr __mmask64 kFirst = 0x3333333333333333;
    return _mm512_mask_shuffle_epi8(Number<PART / 2 + 2>(word), kFirst, Number<PART / 2>(word), high_halves);
  }
};

struct TiledF8 {
  static constexpr int WORDS = 2, STEPS = 1, LEAST = 0, FEWEST = 4;
  struct Words { F8Words first, second; };

  static Words Read(const char* at, int) { return {AsWords(Load<Shorts>(at)), AsWords(Load<Shorts>(at + kLineBytes))}; }
  template <int PART>
  __m512i Line(const Words& w) const { return Cast<__m512i>(AsBF16<PART / 2>(PART % 2 ? w.second : w.first)); }
};

// A step has INPUTS inputs, as many as a tile or half as many.
template <typename Kind, int64_t INPUTS>
struct GroupedTiles : TiledRows {
  static constexpr int64_t kOfChunk = kSteps * kTileInputs / INPUTS;  // steps: as many inputs as with whole tiles
  static constexpr int kGroups = 4;  // of a step each, whose sums are scaled together
  static constexpr int64_t kStepLines = INPUTS / 2, kStepBytes = kStepLines * kLineBytes;
  static constexpr int64_t kWord = 8 * Kind::STEPS, kWordBytes = Kind::WORDS * kLineBytes;  // inputs, and of a panel
  static_assert(kOfChunk * INPUTS % kWord == 0);
  using Products = TileSums[2];  // of two tiles

  Groups groups;
  int64_t steps, run, panel_bytes;  // of an output; of a group
  int64_t stride;                   // bytes of a row: an odd number of lines, or many rows would share a set of a cache
  float* totals;                    // [rows, groups]: by which minima are multiplied
  char* x;                          // [rows, stride]: activations, with those of a word in the order of its parts
  Kind kind;

  explicit GroupedTiles(const LinearArguments& a) : TiledRows(a), groups(a, a.group ? a.inputs / a.group : 1) {
    steps = a.inputs / INPUTS, run = a.group ? a.group / INPUTS : steps;
    panel_bytes = RoundUp(a.inputs, kWord) / kWord * kWordBytes;
    stride = (RoundUp(a.inputs, kTileInputs) / kTileInputs | 1) * kLineBytes;
    totals = factors + RoundUp(a.rows, kPanel);
    x = reinterpret_cast<char*>(totals + Totals());
  }

  int64_t Totals() const { return a.HasMinima() ? RoundUp(a.rows * groups.count, kPanel) : 0; }
  int64_t Bytes() const { return (RoundUp(a.rows, kPanel) + Totals()) * sizeof *factors + a.rows * stride; }

  // Returns the number of rows to prepare.
  int64_t Start() const { return a.rows; }

  // A row that is not finite becomes NaN, as it does where activations are rounded to integers.
  void PrepareRow(int64_t row) const {
    const auto* from = static_cast<const BFloat16*>(a.x) + row * a.inputs;
    factors[row] = Largest(a, row * a.inputs, a.inputs) < __builtin_inff() ? 1 : __builtin_nanf("");
    alignas(64) int16_t order[kTileInputs];
    for (int i = 0; i < kTileInputs; ++i) order[i] = static_cast<int16_t>(i / 8 * 8 + S4::ORDER[i % 8]);
    for (int64_t i = 0; i < a.inputs; i += kTileInputs) {
      const __mmask32 some = a.inputs - i < kTileInputs ? 0xffff : 0xffffffff;
      const __m512i line = _mm512_maskz_loadu_epi16(some, from + i);
      const __m512i ordered = _mm512_permutexvar_epi16(Load<__m512i>(order), line);
      memcpy(x + row * stride + i * 2, &ordered, sizeof ordered);
    }
    for (int64_t group = 0; group < groups.count && a.HasMinima(); ++group) {
      Floats sums = {};
      for (int64_t i = group * a.group; i < (group + 1) * a.group; i += kLanes) sums += Widened(from + i);
      totals[row * groups.count + group] = Total(sums);
    }
  }

  template <int PART>
  void Put(const typename Kind::Words& w, char* to) const {
    const __m512i line = kind.template Line<PART>(w);
    memcpy(to + PART * kLineBytes, &line, sizeof line);
  }

  // Widens the weights of some steps of a panel. What is prefetched is `ahead` bytes further on, if that is not 0.
  void Widen(const char* from, int64_t count, int64_t ahead, char* to) const {
    for (int64_t i = 0; i < count * INPUTS; i += kWord, from += kWordBytes) {
      if (ahead) UNROLL for (int j = 0; j < Kind::WORDS; ++j) __builtin_prefetch(from + ahead + j * kLineBytes, 0, 2);
      for (int step = 0; step < Kind::STEPS; ++step, to += 4 * kLineBytes) {
        const auto w = Kind::Read(from, step);
        Put<0>(w, to), Put<1>(w, to), Put<2>(w, to), Put<3>(w, to);
      }
    }
  }

  // Some steps of a panel: their weights, and the scale and what stands for the minimum of each group that they are of.
  struct Chunk {
    int64_t first, steps;
    alignas(64) char weights[kOfChunk * kStepBytes];
    Floats scales[kOfChunk], zeros[kOfChunk];
  };

  void Fill(const Weight& weight, int64_t panel, int64_t first, Chunk& chunk) const {
    chunk.first = first, chunk.steps = Least(steps - first, kOfChunk);
    const int64_t panels = RoundUp(weight.outputs, kPanel) / kPanel, bytes = kOfChunk * INPUTS / kWord * kWordBytes;
    const int64_t ahead = panel + 2 < panels ? 2 * panel_bytes : 0;  // those after the next panel's
    const char* from = static_cast<const char*>(weight.data) + panel * panel_bytes + first / kOfChunk * bytes;
    Widen(from, chunk.steps, ahead, chunk.weights);
    for (int64_t group = first / run, i = 0; group * run < first + chunk.steps; ++group, ++i) {
      const int64_t unit = group / groups.block;
      chunk.scales[i] = a.group ? groups.Of(weight.scale, weight.scale_unit, panel, group, unit, 0) : Floats{} + 1;
      if (!weight.minimum) continue;
      chunk.zeros[i] = groups.Of(weight.minimum, weight.minimum_unit, panel, group, unit, 0) - chunk.scales[i] * Kind::LEAST;
    }
  }

  // Multiplies a group, as far as it is in the chunks of two panels, with one or two tiles of activations.
  template <int TILES>
  void Multiply(const Chunk (&chunks)[2], int64_t group, const char* const (&from)[2], Products& products) const {
    const int64_t first = group * run > chunks[0].first ? group * run - chunks[0].first : 0;
    const int64_t end = Least((group + 1) * run - chunks[0].first, chunks[0].steps);
    const int64_t of_x = first * INPUTS * 2, of_w = first * kStepBytes;
    const Steps<INPUTS * 2, kStepBytes> at{
        {from[0] + of_x, from[1] + of_x}, {chunks[0].weights + of_w, chunks[1].weights + of_w}, stride};
    ClearSums();
    at.template Add<TiledBF16, TILES>(end - first, [] {});
    StoreSums<TILES>(products);
  }

  // Adds the products of GROUPS groups, as far as they are in the chunks of two panels, and one or two tiles of activations.
  template <int GROUPS, bool MINIMA>
  void Add(const Chunk (&chunks)[2], int64_t group, int64_t tile, bool both, Products* products, TileSums* sums) const {
    const int64_t begin = chunks[0].first / run, rows[] = {RowOf(tile), RowOf(tile + both)};
    const char* from[2];
    for (int i = 0; i < 2; ++i) from[i] = x + rows[i] * stride + chunks[0].first * INPUTS * 2;
    Floats scales[GROUPS][2], zeros[GROUPS][2] = {};
    for (int64_t i = 0; i < GROUPS; ++i) {
      both ? Multiply<2>(chunks, group + i, from, products[i]) : Multiply<1>(chunks, group + i, from, products[i]);
      for (int j = 0; j < 2; ++j) {
        scales[i][j] = chunks[j].scales[group + i - begin];
        // The minimum of a group that is in several chunks is added once.
        if (MINIMA && (group + i) * run >= chunks[j].first) zeros[i][j] = chunks[j].zeros[group + i - begin];
      }
    }
    const bool none = chunks[0].first == 0 && group == 0;
    for (int k = 0; k < 1 + both; ++k) {
      const float* of_rows = totals + rows[k] * groups.count + group;
      for (int64_t row = 0; row < height; ++row)
        UNROLL for (int j = 0; j < 2; ++j) {
          Floats own = none ? Floats{} : sums[k][row][j];
          UNROLL for (int i = 0; i < GROUPS; ++i) {
            own += products[i][k][row][j] * scales[i][j];
            if (MINIMA) own += zeros[i][j] * of_rows[row * groups.count + i];
          }
          sums[k][row][j] = own;
        }
    }
  }

  // Adds the products of two panels' chunks and `count` tiles of activations. Groups of a step are scaled together, so that
  // sums are read and written less often.
  template <bool MINIMA>
  void AddAll(const Chunk (&chunks)[2], int64_t tile, int64_t count, Products* products, TileSums* sums) const {
    const int64_t end = (chunks[0].first + chunks[0].steps - 1) / run + 1;
    for (int64_t i = 0; i < count; i += 2) {
      const bool both = i + 1 < count;
      int64_t group = chunks[0].first / run;
      for (; run == 1 && group + kGroups <= end; group += kGroups)
        Add<kGroups, MINIMA>(chunks, group, tile + i, both, products, sums + i);
      for (; group < end; ++group) Add<1, MINIMA>(chunks, group, tile + i, both, products, sums + i);
    }
  }

  // Multiplies some panels of a weight, and of the one after it if that is gated, with `count` tiles of activations.
  void Work(int part, int64_t panel, int64_t panels, int64_t tile, int64_t count) const {
    const Tiles tiles_in_use(height, INPUTS);
    const int weights = 1 + a.Gated();
    alignas(64) TileSums sums[kMostPairs][kTogether];
    alignas(64) Products products[kGroups];
    Chunk chunks[2];
    for (int64_t first = 0; first < steps; first += kOfChunk)
      for (int64_t i = 0; i < panels; i += 2)
        for (int j = 0; j < weights; ++j) {
          const Weight& weight = a.weights[part + j];
          // A last odd panel is used twice, and stored once.
          for (int64_t k = 0; k < 2; ++k) Fill(weight, panel + Least(i + k, panels - 1), first, chunks[k]);
          auto* own = sums[i / 2 * weights + j];
          weight.minimum ? AddAll<true>(chunks, tile, count, products, own)
                         : AddAll<false>(chunks, tile, count, products, own);
        }
    for (int64_t i = 0; i < panels; i += 2)
      for (int64_t k = 0; k < count; ++k)
        Results(part, panel + i, tile + k, sums[i / 2 * weights][k], sums[(i / 2 + 1) * weights - 1][k]);
  }

  void WorkPiece(int64_t i) const {
    WithPiece(i, [this](auto... of_piece) { Work(of_piece...); });
  }
};

// Calls `use` with the product of the arguments, and returns true, if tiles can compute it and weights are worth widening.
template <typename Kind, typename Use>
bool WithGroupedTiles(const LinearArguments& a, const Use& use) {
  if (a.x_type != Type::kBF16) return false;
  const int64_t group = a.group ? a.group : a.inputs;
  if (group % kTileInputs == 0) return a.rows >= Kind::FEWEST && (use(GroupedTiles<Kind, kTileInputs>(a)), true);
  constexpr int kFewest = Kind::FEWEST > kFewestOfHalves ? Kind::FEWEST : kFewestOfHalves;
  return group % kTile == 0 && a.rows >= kFewest && (use(GroupedTiles<Kind, kTile>(a)), true);
}

}  // namespace
}  // namespace neuronx::NEURONX_LEVEL
#endif
