// Linear layers in tiles with weights of few bits and scales of groups. Weights are widened to bf16, which is exact, once for
// up to 256 rows of activations in bf16. The sums of each group are scaled in f32 and added in vectors.
#pragma once

#include "activations.h"
#include "amx.h"
#include "coded.h"
#include "results.h"

#if defined(__AMX_BF16__)
namespace neuronx::NEURONX_LEVEL {
namespace {

// Block sizes. Weights of some steps of two panels stay in the first-level cache while tiles of activations, two at a
// time, are multiplied with them. Activations of these steps, and the sums of a piece, stay in the second-level cache.
// Pieces have half as many pairs where there would be too few of them for all threads.
constexpr int64_t kSteps = 8, kTogether = 16, kMostPairs = 8, kFewestPieces = 32;

// Rows for which widening weights pays. With half a tile of inputs, products take twice as long.
template <int64_t INPUTS>
constexpr int64_t kFewest = INPUTS == kTileInputs ? 9 : 13;

// Numbers from `least` on, as many as there are lanes.
inline __m512i HalvesFrom(float least) {
  const Floats low = AsFloats(Count()) + least, high = low + static_cast<float>(kLanes);
  return Cast<__m512i>(_mm512_cvtne2ps_pbh(Cast<__m512>(high), Cast<__m512>(low)));
}

// Kinds of weights. A word of WORDS lines has inputs in the order of its parts, and each part, two inputs of each output, is a
// line of a tile. LEAST is as in kinds.h.
struct TiledS4 {
  using Words = UShorts;
  static constexpr int WORDS = 1, STEPS = 1, LEAST = -8;
  __m512i numbers = _mm512_broadcast_i64x4(Cast<__m256i>(_mm512_cvtneps_pbh(Cast<__m512>(AsFloats(Count() << 28 >> 28)))));

  static Words Read(const char* at, int) { return Load<Words>(at); }
  template <int PART>
  __m512i Line(Words w) const { return _mm512_permutexvar_epi16(Cast<__m512i>(w >> 4 * PART), numbers); }
};

struct TiledE2M1 : TiledS4 {
  static constexpr int LEAST = 0;  // not used
  TiledE2M1() { numbers = _mm512_broadcast_i64x4(Cast<__m256i>(_mm512_cvtneps_pbh(Load<__m512>(kE2M1)))); }
};

struct TiledS5 : WholePlanes<1> {
  __m512i numbers = HalvesFrom(LEAST);
  template <int PART>
  __m512i Line(const Words& w) const { return _mm512_permutexvar_epi16(Cast<__m512i>(WholePlanes::Part<PART>(w)), numbers); }
};

struct TiledS6 : WholePlanes<2> {
  __m512i first = HalvesFrom(LEAST), last = HalvesFrom(0);
  template <int PART>
  __m512i Line(const Words& w) const {
    return _mm512_permutex2var_epi16(first, Cast<__m512i>(WholePlanes::Part<PART>(w)), last);
  }
};

// A step has INPUTS inputs, as many as a tile or half as many.
template <typename Kind, int64_t INPUTS>
struct GroupedTiles {
  static constexpr int64_t kSteps = 256 / INPUTS;  // of a chunk, whose weights are in the first-level cache
  static constexpr int kGroups = 4;                // of a step each, whose sums are scaled together
  static constexpr int64_t kStepLines = INPUTS / 2, kStepBytes = kStepLines * kLineBytes;
  static constexpr int64_t kWord = 8 * Kind::STEPS, kWordBytes = Kind::WORDS * kLineBytes;  // inputs, and of a panel
  static_assert(kSteps * INPUTS % kWord == 0);
  using Sums = Floats[kTile][2];  // of a tile of activations and two panels
  using Products = Sums[2];       // of two tiles

  const LinearArguments& a;
  Groups groups;
  int64_t steps, run, panel_bytes;  // of an output; of a group
  int64_t tiles, height;            // of activations, and the rows of one
  int64_t blocks, block;            // of tiles, and the tiles of one
  Pieces pieces;                    // of each
  int64_t stride;                   // bytes of a row: an odd number of lines, or many rows would share a set of a cache
  float* factors;                   // [rows]: 1, or NaN if activations are not finite
  float* totals;                    // [rows, groups]: by which minima are multiplied
  char* x;                          // [rows, stride]: activations, with those of a word in the order of its parts
  Kind kind;

  explicit GroupedTiles(const LinearArguments& a) : a(a), groups(a, a.inputs / a.group) {
    steps = a.inputs / INPUTS, run = a.group / INPUTS;
    panel_bytes = RoundUp(a.inputs, kWord) / kWord * kWordBytes;
    tiles = RoundUp(a.rows, kTile) / kTile, height = RoundUp(a.rows, tiles) / tiles;
    blocks = RoundUp(tiles, kTogether) / kTogether, block = RoundUp(tiles, blocks) / blocks;
    pieces = Pieces(a, 2 * kMostPairs / (1 + a.Gated()));
    if (pieces.count * blocks < kFewestPieces) pieces = Pieces(a, kMostPairs / (1 + a.Gated()));
    stride = (RoundUp(a.inputs, kTileInputs) / kTileInputs | 1) * kLineBytes;
    factors = static_cast<float*>(a.scratch);
    totals = factors + RoundUp(a.rows, kPanel);
    x = reinterpret_cast<char*>(totals + Totals());
  }

  int64_t Totals() const { return a.HasMinima() ? RoundUp(a.rows * groups.count, kPanel) : 0; }
  int64_t Bytes() const { return (RoundUp(a.rows, kPanel) + Totals()) * sizeof *factors + a.rows * stride; }

  // The first row of a tile. If the last tile has too few rows, it repeats some of the rows before.
  int64_t RowOf(int64_t tile) const { return Least(tile * height, a.rows - height); }

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
    alignas(64) char weights[kSteps * kStepBytes];
    Floats scales[kSteps], zeros[kSteps];
  };

  void Fill(const Weight& weight, int64_t panel, int64_t first, Chunk& chunk) const {
    chunk.first = first, chunk.steps = Least(steps - first, kSteps);
    const int64_t panels = RoundUp(weight.outputs, kPanel) / kPanel, bytes = kSteps * INPUTS / kWord * kWordBytes;
    const int64_t ahead = panel + 2 < panels ? 2 * panel_bytes : 0;  // those after the next panel's
    const char* from = static_cast<const char*>(weight.data) + panel * panel_bytes + first / kSteps * bytes;
    Widen(from, chunk.steps, ahead, chunk.weights);
    for (int64_t group = first / run, i = 0; group * run < first + chunk.steps; ++group, ++i) {
      const int64_t unit = group / groups.block;
      chunk.scales[i] = groups.Of(weight.scale, weight.scale_unit, panel, group, unit, 0);
      if (!weight.minimum) continue;
      chunk.zeros[i] = groups.Of(weight.minimum, weight.minimum_unit, panel, group, unit, 0) - chunk.scales[i] * Kind::LEAST;
    }
  }

  // Multiplies a group, as far as it is in the chunks of two panels, with one or two tiles of activations.
  template <int TILES>
  void Multiply(const Chunk (&chunks)[2], int64_t group, const char* const (&from)[2], Products& products) const {
    const int64_t first = group * run > chunks[0].first ? group * run - chunks[0].first : 0;
    const int64_t end = Least((group + 1) * run - chunks[0].first, chunks[0].steps), stride = this->stride;
    const char *x0 = from[0] + first * INPUTS * 2, *x1 = from[1] + first * INPUTS * 2;
    const char *w0 = chunks[0].weights + first * kStepBytes, *w1 = chunks[1].weights + first * kStepBytes;
    ClearTile<0>(), ClearTile<1>(), ClearTile<2>(), ClearTile<3>();
    for (int64_t i = end - first; i > 0; --i) {
      LoadTile<4>(x0, stride);
      LoadTile<6>(w0, kLineBytes);
      AddTileProduct<0, 4, 6>();
      LoadTile<7>(w1, kLineBytes);
      AddTileProduct<1, 4, 7>();
      if constexpr (TILES > 1) {
        LoadTile<5>(x1, stride);
        AddTileProduct<2, 5, 6>();
        AddTileProduct<3, 5, 7>();
      }
      x0 += INPUTS * 2, x1 += INPUTS * 2, w0 += kStepBytes, w1 += kStepBytes;
    }
    StoreTile<0>(products[0][0], 2 * kLineBytes), StoreTile<1>(products[0][0] + 1, 2 * kLineBytes);
    if constexpr (TILES > 1) StoreTile<2>(products[1][0], 2 * kLineBytes), StoreTile<3>(products[1][0] + 1, 2 * kLineBytes);
  }

  // Adds the products of GROUPS groups, as far as they are in the chunks of two panels, and one or two tiles of activations.
  template <int GROUPS, bool MINIMA>
  void Add(const Chunk (&chunks)[2], int64_t group, int64_t tile, bool both, Products* products, Sums* sums) const {
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
  void AddAll(const Chunk (&chunks)[2], int64_t tile, int64_t count, Products* products, Sums* sums) const {
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
    alignas(64) Sums sums[kMostPairs][kTogether];
    alignas(64) Products products[kGroups];
    Chunk chunks[2];
    for (int64_t first = 0; first < steps; first += kSteps)
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

  // Stores the results of two panels and a tile of activations, except for rows that the tile before has.
  void Results(int part, int64_t panel, int64_t tile, const Sums& sums, const Sums& up) const {
    const int64_t row = tile * height, again = row - RowOf(tile), output = panel * kPanel;
    Store(a, a.weights[part], row, static_cast<int>(height - again), factors + row, output,
          Least(a.weights[part].outputs - output, 2 * kPanel), 2, sums[again], up[again]);
  }

  int64_t Count() const { return pieces.count * blocks; }

  void WorkPiece(int64_t i) const {
    const auto [part, panel] = pieces.At(i / blocks);
    const int64_t tile = i % blocks * block, panels = RoundUp(a.weights[part].outputs, kPanel) / kPanel;
    Work(part, panel, Least(panels - panel, pieces.panels), tile, Least(tiles - tile, block));
  }
};

// Calls `use` with the product of the arguments, and returns true, if tiles can compute it and weights are worth widening.
template <typename Kind, typename Use>
bool WithGroupedTiles(const LinearArguments& a, const Use& use) {
  if (a.x_type != Type::kBF16 || !a.group) return false;
  if (a.group % kTileInputs == 0) return a.rows >= kFewest<kTileInputs> && (use(GroupedTiles<Kind, kTileInputs>(a)), true);
  return a.group % kTile == 0 && a.rows >= kFewest<kTile> && (use(GroupedTiles<Kind, kTile>(a)), true);
}

}  // namespace
}  // namespace neuronx::NEURONX_LEVEL
#endif
