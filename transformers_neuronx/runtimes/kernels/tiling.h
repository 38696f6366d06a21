// What linear layers in tiles share: how work is divided, and products of two panels with one or two tiles of activations.
#pragma once

#include "amx.h"
#include "results.h"

#if defined(__AMX_BF16__)
namespace neuronx::NEURONX_LEVEL {
namespace {

// Block sizes. Weights of some steps of two panels stay in the first-level cache while tiles of activations, two at a
// time, are multiplied with them. Activations of these steps, and the sums of a piece, stay in the second-level cache.
// Pieces have half as many pairs where there would be too few of them for all threads.
constexpr int64_t kSteps = 8, kTogether = 16, kMostPairs = 8, kFewestPieces = 32;

using TileSums = Floats[kTile][2];  // of a tile of activations and two panels
static_assert(2 * kTile <= kMostSums);

// Products of numbers in bf16.
struct TiledBF16 {
  static constexpr bool BYTES = false;
  static constexpr int64_t INPUTS = kTileInputs;  // of a step
  template <int SUMS, int X, int W>
  static void Add() { AddTileProduct<SUMS, X, W>(); }
  template <int SUMS, int X, int W>
  static void AddSecond() { AddTileProduct<SUMS, X, W>(); }
};

inline void ClearSums() { ClearTile<0>(), ClearTile<1>(), ClearTile<2>(), ClearTile<3>(); }

template <int TILES>
void LoadSums(const TileSums* sums) {
  LoadTile<0>(sums[0][0], 2 * kLineBytes), LoadTile<1>(sums[0][0] + 1, 2 * kLineBytes);
  if constexpr (TILES > 1) LoadTile<2>(sums[1][0], 2 * kLineBytes), LoadTile<3>(sums[1][0] + 1, 2 * kLineBytes);
}

template <int TILES>
void StoreSums(TileSums* sums) {
  StoreTile<0>(sums[0][0], 2 * kLineBytes), StoreTile<1>(sums[0][0] + 1, 2 * kLineBytes);
  if constexpr (TILES > 1) StoreTile<2>(sums[1][0], 2 * kLineBytes), StoreTile<3>(sums[1][0] + 1, 2 * kLineBytes);
}

// Where a step of products has its tiles: two of activations, with so many bytes from a row to the next, and those of two
// panels. Then comes the next step.
template <int64_t X_STEP, int64_t W_STEP>
struct Steps {
  const char *x[2], *w[2];
  int64_t stride;

  // Adds the products of `count` steps to the sums in tiles, and calls `each` after each.
  template <typename Kind, int TILES, typename Each>
  __attribute__((always_inline)) void Add(int64_t count, const Each& each) const {
    const char *x0 = x[0], *x1 = x[1], *w0 = w[0], *w1 = w[1];
    for (; count > 0; --count) {
      LoadTile<4>(x0, stride);
      LoadTile<6>(w0, kLineBytes);
      Kind::template Add<0, 4, 6>();
      LoadTile<7>(w1, kLineBytes);
      Kind::template Add<1, 4, 7>();
      if constexpr (TILES > 1) {
        LoadTile<5>(x1, stride);
        Kind::template AddSecond<2, 5, 6>();
        Kind::template AddSecond<3, 5, 7>();
      }
      each();
      x0 += X_STEP, x1 += X_STEP, w0 += W_STEP, w1 += W_STEP;
    }
  }
};

// Tiles of rows, and the pieces of work that they and the outputs make.
struct TiledRows {
  const LinearArguments& a;
  int64_t tiles, height;  // of activations, and the rows of one
  int64_t blocks, block;  // of tiles, and the tiles of one
  Pieces pieces;          // of each
  float* factors;         // [rows]: of sums; NaN where weights are integers and activations are not finite

  explicit TiledRows(const LinearArguments& a) : a(a), factors(static_cast<float*>(a.scratch)) {
    tiles = RoundUp(a.rows, kTile) / kTile;
    height = RoundUp(a.rows, tiles) / tiles;  // a tile with fewer rows takes less time
    blocks = RoundUp(tiles, kTogether) / kTogether;
    block = RoundUp(tiles, blocks) / blocks;
    pieces = Pieces(a, 2 * kMostPairs / (1 + a.Gated()));
    if (pieces.count * blocks < kFewestPieces) pieces = Pieces(a, kMostPairs / (1 + a.Gated()));
  }

  // The first row of a tile. If the last tile has too few rows, it repeats some of the rows before.
  int64_t RowOf(int64_t tile) const { return Least(tile * height, a.rows - height); }

  int64_t Count() const { return pieces.count * blocks; }

  // Calls `work` with what a piece has: a part, the first of its panels and how many, and the same of tiles.
  template <typename Work>
  void WithPiece(int64_t i, const Work& work) const {
    const auto [part, panel] = pieces.At(i / blocks);
    const int64_t tile = i % blocks * block, panels = RoundUp(a.weights[part].outputs, kPanel) / kPanel;
    work(part, panel, Least(panels - panel, pieces.panels), tile, Least(tiles - tile, block));
  }

  // Stores the results of two panels and a tile of activations, except for rows that the tile before has.
  void Results(int part, int64_t panel, int64_t tile, const TileSums& sums, const TileSums& up) const {
    const int64_t row = tile * height, again = row - RowOf(tile), output = panel * kPanel;
    Store(a, a.weights[part], row, static_cast<int>(height - again), factors + row, output,
          Least(a.weights[part].outputs - output, 2 * kPanel), 2, sums[again], up[again]);
  }
};

}  // namespace
}  // namespace neuronx::NEURONX_LEVEL
#endif
