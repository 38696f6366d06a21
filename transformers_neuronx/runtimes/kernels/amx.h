// Tiles, the registers of AMX: up to 16 rows of 64 bytes. A tile product adds the product of two tiles in bf16 to a
// third tile of 16 x 16 floats. A row of the first tile has 32 numbers. So does a column of the second, in 16 pairs. Or
// both have 64 bytes, in words of four, and sums are integers.
#pragma once

#include "vectors.h"

#if defined(__AMX_BF16__)
namespace neuronx::NEURONX_LEVEL {
namespace {

constexpr int64_t kTile = 16;  // rows, and words of a row
constexpr int64_t kTileInputs = 2 * kTile, kLineBytes = 4 * kTile, kTileBytes = kTile * kLineBytes;

// The compiler's own functions need literal tile numbers, and do not declare that they read memory.
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

template <int SUMS, int X, int W>
inline void AddSigned() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUMS), "i"(X), "i"(W));
}

// The same with bytes of activations from 0 to 255.
template <int SUMS, int X, int W>
inline void AddUnsigned() {
  asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUMS), "i"(X), "i"(W));
}

struct TileShape { int64_t rows, bytes; };  // bytes of a row

// While this object exists, the thread has tiles. They are released at the end, or every switch to another thread would
// save them.
struct Tiles {
  explicit Tiles(const TileShape (&wanted)[8]) {
    struct { uint8_t palette, start, reserved[14]; uint16_t bytes[16]; uint8_t rows[16]; } shapes = {};
    shapes.palette = 1;
    for (int tile = 0; tile < 8; ++tile) {
      shapes.bytes[tile] = static_cast<uint16_t>(wanted[tile].bytes);
      shapes.rows[tile] = static_cast<uint8_t>(wanted[tile].rows);
    }
    asm volatile("ldtilecfg %0" : : "m"(shapes));
  }

  // 0 to 3 are sums and 4 and 5 activations, with so many rows each, and 6 and 7 are weights. Both have so many inputs in
  // bf16.
  explicit Tiles(int64_t rows, int64_t inputs = kTileInputs)
      : Tiles({{rows, kLineBytes}, {rows, kLineBytes}, {rows, kLineBytes}, {rows, kLineBytes}, {rows, inputs * 2},
               {rows, inputs * 2}, {inputs / 2, kLineBytes}, {inputs / 2, kLineBytes}}) {}

  Tiles(const Tiles&) = delete;
  ~Tiles() { asm volatile("tilerelease"); }
};

}  // namespace
}  // namespace neuronx::NEURONX_LEVEL
#endif
