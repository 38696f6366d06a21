// Products of bf16 in tiles, registers of 16 rows of 64 bytes. A tile of activations has 32 inputs of up to 16 rows, one
// of weights those of 16 outputs: sixteen lines of a panel, as they lie.
#pragma once

#include "results.h"

#if defined(__AMX_BF16__)
namespace neuronx::NEURONX_LEVEL {
namespace {

constexpr int64_t kTile = 16;  // rows, and words of a row
constexpr int64_t kTileInputs = 2 * kTile, kLineBytes = 4 * kTile, kTileBytes = kTile * kLineBytes;

// What is worked on at once. Weights of some steps of two panels stay in the first cache while tiles of activations, two
// by two, are multiplied with them. Activations of these steps, and the sums of a piece, stay in the second.
constexpr int64_t kSteps = 8, kTogether = 16, kPairs = 4;

// The compiler's own functions want numbers of tiles that are written out, and do not say that they read memory.
template <int TILE>
inline void LoadTile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0, %1, 1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(TILE) : "memory");
}

template <int TILE>
inline void StoreTile(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0, %1, 1)" : : "r"(to), "r"(stride), "i"(TILE) : "memory");
}

template <int TILE>
inline void ClearTile() { asm volatile("tilezero %%tmm%c0" : : "i"(TILE)); }

template <int SUMS, int X, int W>
inline void AddTileProduct() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUMS), "i"(X), "i"(W));
}

// While this is there, a thread has tiles: 0 to 3 are sums, 4 and 5 activations, of so many rows, 6 and 7 weights. Were
// they kept, they would be saved whenever another thread takes the processor.
struct Tiles {
  explicit Tiles(int64_t rows) {
    struct { uint8_t palette, start, reserved[14]; uint16_t bytes[16]; uint8_t rows[16]; } shapes = {};
    shapes.palette = 1;
    for (int tile = 0; tile < 8; ++tile) {
      shapes.bytes[tile] = kLineBytes;
      shapes.rows[tile] = static_cast<uint8_t>(tile < 6 ? rows : kTile);
    }
    asm volatile("ldtilecfg %0" : : "m"(shapes));
  }
  ~Tiles() { asm volatile("tilerelease"); }
};

struct TileProduct {
  typedef Floats Sums[kTogether][kTile][2];  // of some tiles of activations and two panels

  // Some steps of two panels.
  struct Chunk {
    int64_t first, steps;
    const char *weights[2], *next;  // tiles of each; what will be wanted after them
  };

  const LinearArguments& a;
  int64_t words, steps, panel_bytes;  // words and steps of an output
  int64_t tiles, height;              // of activations, and the rows of one
  bool in_place;                      // whether activations are used where they lie
  int64_t stride;                     // bytes of a row
  char* x;                            // [rows, stride]

  explicit TileProduct(const LinearArguments& a) : a(a) {
    words = RoundUp(a.inputs, 2) / 2;
    steps = RoundUp(words, kTile) / kTile;
    panel_bytes = words * kLineBytes;
    tiles = RoundUp(a.rows, kTile) / kTile;
    height = RoundUp(a.rows, tiles) / tiles;  // few rows take less time than many
    in_place = a.inputs % kTileInputs == 0;
    stride = steps * kLineBytes;
    x = static_cast<char*>(in_place ? const_cast<void*>(a.x) : a.scratch);
  }

  int64_t Bytes() const { return in_place ? 0 : a.rows * stride; }

  // The first row of a tile. The last one has some of the rows before once more, if there are not enough.
  int64_t RowOf(int64_t tile) const { return Least(tile * height, a.rows - height); }

  void PrepareRow(int64_t row) const {
    auto* active = reinterpret_cast<BFloat16*>(x + row * stride);
    Prepare(a, row * a.inputs, active);
    memset(active + a.inputs, 0, stride - a.inputs * sizeof *active);
  }

  // Tiles of a panel: where they lie, or with zeros behind them, as what lies there need not be finite.
  const char* Weights(const Weight& weight, int64_t panel, const Chunk& chunk, char* room) const {
    const char* from = static_cast<const char*>(weight.data) + panel * panel_bytes + chunk.first * kTileBytes;
    const int64_t all = chunk.steps * kTileBytes, there = Least(panel_bytes - chunk.first * kTileBytes, all);
    if (there == all) return from;
    memcpy(room, from, there);
    memset(room + there, 0, all - there);
    return room;
  }

  // Adds the products of a chunk to the sums of `count` tiles of activations.
  void Add(const Chunk& chunk, int64_t tile, int64_t count, Sums& sums) const {
    const int64_t turns = (count + 1) / 2;
    for (int64_t i = 0; i < turns; ++i)
      2 * i + 1 < count ? AddTiles<2>(chunk, tile + 2 * i, i, turns, sums + 2 * i)
                        : AddTiles<1>(chunk, tile + 2 * i, i, turns, sums + 2 * i);
  }

  // Those of one or two of them, at such a turn of all: each asks for a part of what is next.
  template <int TILES>
  void AddTiles(const Chunk& chunk, int64_t tile, int64_t turn, int64_t turns, Floats (*sums)[kTile][2]) const {
    constexpr int64_t kRow = sizeof sums[0][0];
    const int64_t stride = this->stride, panel_bytes = this->panel_bytes;  // or they would be read again and again
    const char* x0 = x + RowOf(tile) * stride + chunk.first * kLineBytes;
    const char* x1 = x + RowOf(tile + TILES - 1) * stride + chunk.first * kLineBytes;
    const char *w0 = chunk.weights[0], *w1 = chunk.weights[1], *next = chunk.next;
    Floats *low = sums[0][0], *high = sums[TILES - 1][0];
    if (chunk.first == 0) {
      ClearTile<0>(), ClearTile<1>(), ClearTile<2>(), ClearTile<3>();
    } else {
      LoadTile<0>(low, kRow), LoadTile<1>(low + 1, kRow);
      if constexpr (TILES > 1) LoadTile<2>(high, kRow), LoadTile<3>(high + 1, kRow);
    }
    for (int64_t i = chunk.steps; i > 0; --i) {
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
      for (int64_t line = turn; line < kTile; line += turns) {
        __builtin_prefetch(next + line * kLineBytes, 0, 2);
        __builtin_prefetch(next + panel_bytes + line * kLineBytes, 0, 2);
      }
      x0 += kLineBytes, x1 += kLineBytes, w0 += kTileBytes, w1 += kTileBytes, next += kTileBytes;
    }
    StoreTile<0>(low, kRow), StoreTile<1>(low + 1, kRow);
    if constexpr (TILES > 1) StoreTile<2>(high, kRow), StoreTile<3>(high + 1, kRow);
  }

  // Some panels of a weight and `count` tiles of activations.
  void Work(int part, int64_t panel, int64_t panels, int64_t tile, int64_t count) const {
    const Tiles tiles_in_use(height);
    const int weights = 1 + a.Gated();
    alignas(64) char room[2][kSteps * kTileBytes];
    alignas(64) Sums sums[kPairs];
    for (int64_t first = 0; first < steps; first += kSteps)
      for (int64_t i = 0; i < panels; i += 2)
        for (int j = 0; j < weights; ++j) {
          const Weight& weight = a.weights[part + j];
          const int64_t next = i + 2 < panels ? 2 * panel_bytes : kSteps * kTileBytes - i * panel_bytes;
          Chunk chunk = {first, Least(steps - first, kSteps)};
          for (int64_t k = 0; k < 2; ++k)  // an odd one is its own neighbour, and those sums are not stored
            chunk.weights[k] = Weights(weight, panel + Least(i + k, panels - 1), chunk, room[k]);
          chunk.next = static_cast<const char*>(weight.data) + (panel + i) * panel_bytes + first * kTileBytes + next;
          Add(chunk, tile, count, sums[i / 2 * weights + j]);
        }
    for (int64_t i = 0; i < panels; i += 2)
      for (int64_t j = 0; j < count; ++j)
        Results(part, panel + i, tile + j, sums[i / 2 * weights][j], sums[(i / 2 + 1) * weights - 1][j]);
  }

  // Of two panels and a tile of activations: of its rows, those that the tile before has not.
  void Results(int part, int64_t panel, int64_t tile, const Floats (&sums)[kTile][2],
               const Floats (&up)[kTile][2]) const {
    const int64_t row = tile * height, again = row - RowOf(tile), output = panel * kPanel;
    float factors[kTile];
    for (float& factor : factors) factor = 1;
    Store(a, a.weights[part], row, static_cast<int>(height - again), factors, output,
          Least(a.weights[part].outputs - output, 2 * kPanel), 2, sums[again], up[again]);
  }

  void Run(const Pool& pool) const {
    if (!in_place) ForEach(pool, a.rows, [this](int64_t row) { PrepareRow(row); });
    const Pieces pieces(a, 2 * kPairs / (1 + a.Gated()));
    const int64_t blocks = RoundUp(tiles, kTogether) / kTogether, block = RoundUp(tiles, blocks) / blocks;
    ForEach(pool, pieces.count * blocks, [&](int64_t i) {
      const auto [part, panel] = pieces.At(i / blocks);
      const int64_t tile = i % blocks * block, panels = RoundUp(a.weights[part].outputs, kPanel) / kPanel;
      Work(part, panel, Least(panels - panel, pieces.panels), tile, Least(tiles - tile, block));
    });
  }
};

}  // namespace
}  // namespace neuronx::NEURONX_LEVEL
#endif
