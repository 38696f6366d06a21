// Linear layers in tiles. A tile of activations has 32 inputs of up to 16 rows. A tile of weights has those inputs of 16
// outputs. In bf16, that is sixteen lines of a panel, used in place. So are bytes, with 64 inputs: activations are rounded
// to integers of 16 bits, as in vectors, and their high and low bytes are multiplied. Other weights are widened first, see
// grouped.h.
#pragma once

#include "grouped.h"

#if defined(__AMX_BF16__)
namespace neuronx::NEURONX_LEVEL {
namespace {

// With up to so many tiles, memory takes longer than products. Fewer steps let weights come more evenly. Tiles are multiplied
// one at a time: from the second one on, weights are in the first-level cache, and do not wait for its few places for lines
// that come from further away, which prefetching fills.
constexpr int64_t kFew = 4;

constexpr int64_t kMostRun = 4;  // steps of bytes after which their sums, integers of 32 bits, become floats
static_assert(kMostRun * kTile == S8::RUN && kSteps / 2 % kMostRun == 0);

// Products of bytes. The first tile of activations has their high bytes, the second one their low bytes.
struct TiledS8 {
  static constexpr bool BYTES = true;
  static constexpr int64_t INPUTS = 2 * kTileInputs;
  template <int SUMS, int X, int W>
  static void Add() { AddSigned<SUMS, X, W>(); }
  template <int SUMS, int X, int W>
  static void AddSecond() { AddUnsigned<SUMS, X, W>(); }
};

// A line of a panel has a word of each output, and is a line of a tile.
template <typename Kind>
struct TileProduct : TiledRows {
  static constexpr int64_t kStep = kLineBytes * (1 + Kind::BYTES);

  // Some steps of two panels.
  struct Chunk {
    int64_t first, steps;
    const char *weights[2], *next;  // tiles of each; what to prefetch, and a panel further on
    int64_t room;                   // bytes of both that are in the weight
    const float* scales[2];         // of the groups of each
  };

  int64_t words, steps, panel_bytes;  // words and steps of an output
  int64_t run;                        // steps of a group of bytes, or after which integers become floats
  int64_t together, pace;             // tiles that are multiplied at once; steps of a chunk
  bool in_place;                      // whether activations are used without a copy
  int64_t stride;                     // bytes of a row
  char* x;                            // [rows, stride]

  explicit TileProduct(const LinearArguments& a) : TiledRows(a) {
    constexpr int64_t kWord = Kind::INPUTS / kTile;
    words = RoundUp(a.inputs, kWord) / kWord;
    steps = RoundUp(a.inputs, Kind::INPUTS) / Kind::INPUTS;
    run = a.group ? a.group / Kind::INPUTS : kMostRun;
    panel_bytes = words * kLineBytes;
    together = block <= kFew || Kind::BYTES ? 1 : 2, pace = block <= kFew ? kSteps / 2 : kSteps;
    in_place = !Kind::BYTES && a.inputs % kTileInputs == 0;
    stride = Kind::BYTES ? (2 * steps + 1) * kLineBytes : steps * kLineBytes;  // odd: see grouped.h
    x = static_cast<char*>(in_place ? const_cast<void*>(a.x) : static_cast<void*>(factors + RoundUp(a.rows, kPanel)));
  }

  int64_t Bytes() const { return RoundUp(a.rows, kPanel) * sizeof *factors + (in_place ? 0 : a.rows * stride); }

  // Returns the number of rows to prepare.
  int64_t Start() const {
    if (!in_place) return a.rows;
    for (int64_t row = 0; row < a.rows; ++row) factors[row] = 1;
    return 0;
  }

  void PrepareRow(int64_t row) const {
    if constexpr (Kind::BYTES) return Split(row);
    factors[row] = 1;
    auto* active = reinterpret_cast<BFloat16*>(x + row * stride);
    Prepare(a, row * a.inputs, active);
    memset(active + a.inputs, 0, stride - a.inputs * sizeof *active);
  }

  // Rounds a row to integers, as `Round` does, and puts their high and low bytes into lines, in turns.
  void Split(int64_t row) const {
    const Rounding rounding = RoundingOf(a, row * a.inputs, a.inputs, S8::MOST);
    char* to = x + row * stride;
    for (int64_t i = 0; i < steps * Kind::INPUTS; i += kLanes) {
      const int64_t left = a.inputs - i;
      const bool none = left <= 0 || !rounding.Finite();
      const Ints whole = none ? Ints{} : Rounded(Some(a.x, a.x_type, row * a.inputs + i, left) * rounding.inverse);
      char* at = to + i / kLineBytes * 2 * kLineBytes + i % kLineBytes;
      _mm_storeu_si128(reinterpret_cast<__m128i*>(at), _mm512_cvtepi32_epi8(Cast<__m512i>(whole >> 8)));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(at + kLineBytes), _mm512_cvtepi32_epi8(Cast<__m512i>(whole)));
    }
    factors[row] = rounding.factor;
  }

  // The tiles of a panel, in place if they can be. Past its end are zeros, since memory there need not be finite.
  const char* Weights(const Weight& weight, int64_t panel, const Chunk& chunk, char* room) const {
    const char* from = static_cast<const char*>(weight.data) + panel * panel_bytes + chunk.first * kTileBytes;
    const int64_t lines = Least(panel_bytes - chunk.first * kTileBytes, chunk.steps * kTileBytes) / kLineBytes;
    if (lines == chunk.steps * kTile) return from;
    memcpy(room, from, lines * kLineBytes);
    memset(room + lines * kLineBytes, 0, (chunk.steps * kTile - lines) * kLineBytes);
    return room;
  }

  // Adds the products of a chunk to the sums of `count` tiles of activations.
  void Add(const Chunk& chunk, int64_t tile, int64_t count, TileSums* sums) const {
    const int64_t turns = RoundUp(count, together) / together;
    const int64_t lines = RoundUp(kTile, turns) / turns;
    const int64_t asks = turns * chunk.steps * lines * kLineBytes <= chunk.room ? lines : 0;
    for (int64_t turn = 0, i = 0; turn < turns; ++turn, i += together)
      Least(count - i, together) > 1 ? AddTiles<2>(chunk, tile + i, turn, asks, sums + i)
                                     : AddTiles<1>(chunk, tile + i, turn, asks, sums + i);
  }

  // Adds those of one or two tiles. Each turn prefetches a part of the next weights, with each step `asks` lines.
  template <int TILES>
  void AddTiles(const Chunk& chunk, int64_t tile, int64_t turn, int64_t asks, TileSums* sums) const {
    if constexpr (Kind::BYTES) return AddBytes(chunk, tile, turn, asks, *sums);
    chunk.first ? LoadSums<TILES>(sums) : ClearSums();
    Multiply<TILES>(chunk, 0, chunk.steps, tile, turn, asks);
    StoreSums<TILES>(sums);
  }

  // Adds the sums of each run, which are integers. A chunk has whole runs, unless it is the last one.
  void AddBytes(const Chunk& chunk, int64_t tile, int64_t turn, int64_t asks, TileSums& sums) const {
    for (int64_t i = 0; i < chunk.steps; i += run) {
      ClearSums();
      Multiply<2>(chunk, i, Least(chunk.steps, i + run), tile, turn, asks);
      alignas(64) TileSums some[2];
      StoreSums<2>(some);
      const int64_t group = (chunk.first + i) / run;
      Floats scales[2];
      for (int64_t k = 0; k < 2; ++k) scales[k] = a.group ? Widened(chunk.scales[k] + group * kPanel) : Floats{} + 1;
      for (int64_t row = 0; row < height; ++row)
        UNROLL for (int k = 0; k < 2; ++k) {
          const Floats sum = AsFloats(Cast<Ints>(some[0][row][k]) * 256 + Cast<Ints>(some[1][row][k]));
          sums[row][k] = (group ? sums[row][k] : Floats{}) + sum * scales[k];
        }
    }
  }

  // Adds the products of some steps of a chunk to the sums in tiles: of one or two tiles of activations, or of the two that
  // bytes have.
  template <int TILES>
  void Multiply(const Chunk& chunk, int64_t first, int64_t end, int64_t tile, int64_t turn, int64_t asks) const {
    const int64_t of_x = (chunk.first + first) * kStep, of_w = first * kTileBytes;
    const char* rows = x + RowOf(tile) * stride + of_x;
    const char* others = Kind::BYTES ? rows + kLineBytes : x + RowOf(tile + TILES - 1) * stride + of_x;
    const char* next = chunk.next + (turn * chunk.steps + first) * asks * kLineBytes;
    const int64_t panel_bytes = this->panel_bytes;  // or it would be read at each step
    const Steps<kStep, kTileBytes> at{{rows, others}, {chunk.weights[0] + of_w, chunk.weights[1] + of_w}, stride};
    at.template Add<Kind, TILES>(end - first, [&]() __attribute__((always_inline)) {
      // Line after line: the processor's own prefetching joins in where it sees no gaps.
      for (int64_t line = 0; line < asks; ++line, next += kLineBytes) {
        __builtin_prefetch(next, 0, 2);
        __builtin_prefetch(next + panel_bytes, 0, 2);
      }
    });
  }

  // Multiplies some panels of a weight with `count` tiles of activations.
  void Work(int part, int64_t panel, int64_t panels, int64_t tile, int64_t count) const {
    const Tiles tiles_in_use(height);
    const int weights = 1 + a.Gated();
    alignas(64) char room[2][kSteps * kTileBytes];
    alignas(64) TileSums sums[kMostPairs][kTogether];
    for (int64_t first = 0; first < steps; first += pace)
      for (int64_t i = 0; i < panels; i += 2)
        for (int j = 0; j < weights; ++j) {
          const Weight& weight = a.weights[part + j];
          Chunk chunk = {first, Least(steps - first, pace)};
          for (int64_t k = 0; k < 2; ++k) {
            const int64_t at = panel + Least(i + k, panels - 1);  // a last odd one is used twice, and stored once
            chunk.weights[k] = Weights(weight, at, chunk, room[k]);
            if (a.group) chunk.scales[k] = static_cast<const float*>(weight.scale) + at * (steps / run) * kPanel;
          }
          const int64_t next = Next(weight, panel, panels, i + 2, first);
          chunk.next = static_cast<const char*>(weight.data) + next;
          chunk.room = (RoundUp(weight.outputs, kPanel) / kPanel - 1) * panel_bytes - next;
          Add(chunk, tile, count, sums[i / 2 * weights + j]);
        }
    for (int64_t i = 0; i < panels; i += 2)
      for (int64_t j = 0; j < count; ++j)
        Results(part, panel + i, tile + j, sums[i / 2 * weights][j], sums[(i / 2 + 1) * weights - 1][j]);
  }

  // Where the weights after those of two panels are: of the next two, or the next steps of the first ones, or the next piece.
  int64_t Next(const Weight& weight, int64_t panel, int64_t panels, int64_t i, int64_t first) const {
    if (i >= panels) i = 0, first += pace;
    if (first >= steps) first = 0, panel += panels;
    const int64_t two = RoundUp(weight.outputs, kPanel) / kPanel - 2, last = two > 0 ? two : 0;
    return Least(panel + i, last) * panel_bytes + first * kTileBytes;
  }

  void WorkPiece(int64_t i) const {
    WithPiece(i, [this](auto... of_piece) { Work(of_piece...); });
  }
};

// Calls `use` with the product of the arguments' kind, and returns true, if tiles can compute it.
template <typename Use>
bool WithTiles(const LinearArguments& a, const Use& use) {
  const bool narrow = a.x_type == Type::kBF16;
  if (a.x_type == Type::kF32 || a.rounded) return false;
  switch (a.weight_type) {
    case Type::kBF16:
      return narrow && (use(TileProduct<TiledBF16>(a)), true);
    case Type::kS8: {
      const bool plain = a.scale_type == Type::kF32 && !a.block && !a.HasMinima();
      const bool whole = a.group && a.group % TiledS8::INPUTS == 0 && kMostRun * TiledS8::INPUTS % a.group == 0;
      if (!a.group || (plain && whole)) return use(TileProduct<TiledS8>(a)), true;
      return WithGroupedTiles<WidenedS8>(a, use);
    }
    case Type::kF8: return WithGroupedTiles<TiledF8>(a, use);
    case Type::kS4: return WithGroupedTiles<TiledS4>(a, use);
    case Type::kS5: return WithGroupedTiles<TiledS5>(a, use);
    case Type::kS6: return WithGroupedTiles<TiledS6>(a, use);
    case Type::kE2M1: return WithGroupedTiles<TiledE2M1>(a, use);
    default: return false;
  }
}

}  // namespace
}  // namespace neuronx::NEURONX_LEVEL
#else
namespace neuronx::NEURONX_LEVEL {
namespace {

template <typename Use>
bool WithTiles(const LinearArguments&, const Use&) { return false; }

}  // namespace
}  // namespace neuronx::NEURONX_LEVEL
#endif
