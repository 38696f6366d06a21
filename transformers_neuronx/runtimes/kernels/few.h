// Products of few rows of activations, bound by the reading of the weights.
//
// Both lie along the inputs, so a result is the sum of one vector of products: kTile x kTile of them are worked out
// at once, each load serving several. Further rows find the weights of a piece in the processor's cache.
#pragma once

#include "linear.h"

namespace neuronx::NEURONX_LEVEL {
namespace {

constexpr int kTile = kLanes == 16 ? 4 : 2;
constexpr int64_t kPieceBytes = 128 << 10;  // of weights: small beside a core's cache, large beside the cost of a piece

// Weights come as a stream, which the processor has to be asked for long before, but not into its nearest cache. On two
// cores of a Zen 4, where reading alone gave 27 to 34 GB/s: one row of 4 bits at 25 GB/s in place of 10, eight rows of
// 8 bits at 16 in place of 10.
constexpr int64_t kAhead = 16 << 10;  // bytes

inline void Ask(const void* at, int64_t ahead = kAhead) {
  __builtin_prefetch(static_cast<const char*>(at) + ahead, 0, 2);
}

// In a register: compilers would rather load it for each of the outputs.
template <typename Vector>
inline void Keep(Vector& x) {
#if defined(__x86_64__)
  asm("" : "+v"(x));
#endif
}

// The vectors that sum up to the results of ROWS rows of activations and OUTPUTS of the weight.
template <int ROWS, int OUTPUTS>
using Sums = Floats[ROWS][OUTPUTS];

template <typename Kind, int ROWS, int OUTPUTS>
void Tile(Kind, const typename Kind::Weight* w, int64_t inputs, const typename Kind::Active* x, int64_t stride,
          Sums<ROWS, OUTPUTS>& totals) {
  const int64_t steps = inputs / Kind::STEP, rest = inputs % Kind::STEP;
  for (int64_t first = 0; first < steps; first += Kind::RUN) {
    const int64_t last = steps - first < Kind::RUN ? steps : first + Kind::RUN;
    typename Kind::Sums sums[OUTPUTS][ROWS] = {};
    for (int64_t step = first; step < last; ++step) {
      typename Kind::Vector active[ROWS];
      UNROLL for (int row = 0; row < ROWS; ++row) {
        active[row] = Kind::LoadActive(x + row * stride + step * Kind::STEP);
        if (OUTPUTS > 1) Keep(active[row]);
      }
      UNROLL for (int output = 0; output < OUTPUTS; ++output) {
        const auto* at = w + output * inputs + step * Kind::STEP;
        const auto weight = Kind::LoadWeight(at);
        Ask(at);
        UNROLL for (int row = 0; row < ROWS; ++row)
          sums[output][row] = Kind::Add(sums[output][row], weight, active[row]);
      }
    }
    UNROLL for (int row = 0; row < ROWS; ++row)
      UNROLL for (int output = 0; output < OUTPUTS; ++output) totals[row][output] += AsFloats(sums[output][row]);
  }
  if (!rest) return;
  for (int output = 0; output < OUTPUTS; ++output) {
    typename Kind::Weight part[Kind::STEP] = {};
    memcpy(part, w + output * inputs + steps * Kind::STEP, rest * sizeof part[0]);
    for (int row = 0; row < ROWS; ++row) {
      const auto active = Kind::LoadActive(x + row * stride + steps * Kind::STEP);
      totals[row][output] += AsFloats(Kind::Add(typename Kind::Sums{}, Kind::LoadWeight(part), active));
    }
  }
}

// As above, with scales for each step.
template <int ROWS, int OUTPUTS>
struct GroupedTile {
  const uint8_t* w;
  const int8_t* x;
  int64_t stride, bytes, groups, ahead;  // bytes of an output; of scales those that go with kAhead
  const BFloat16* scale;
  const S4::Scales scales;
  Sums<ROWS, OUTPUTS> totals = {};

  GroupedTile(const uint8_t* w, int64_t inputs, const int8_t* x, int64_t stride, const BFloat16* scale, int64_t group)
      : w(w), x(x), stride(stride), bytes(inputs / 2), groups(inputs / group), ahead(kAhead * 4 / group), scale(scale),
        scales(inputs, group) {
    const int64_t whole = bytes / S4::BYTES;
    for (int64_t step = 0; step < whole; ++step) Add<true>(step, S4::BYTES);
    if (bytes % S4::BYTES) Add<false>(whole, bytes % S4::BYTES);
  }

  template <bool WHOLE>
  void Add(int64_t step, int64_t count) {
    UNROLL for (int output = 0; output < OUTPUTS; ++output) {
      const uint8_t* at = w + output * bytes + step * S4::BYTES;
      const BFloat16* own = scale + output * groups;
      Ask(at);
      Ask(own + (step * S4::BYTES >> scales.shift), ahead);
      const Nibbles both = (WHOLE ? Load<Nibbles>(at) : LoadPart<Nibbles>(at, count)) ^ 0x88;  // 8 more
      const Floats factors = scales.template Of<WHOLE>(own, step);
      UNROLL for (int row = 0; row < ROWS; ++row) {
        const S4::Step active(x + row * stride + step * S4::STEP);
        totals[row][output] += active.Times(both & 15, both >> 4) * factors;
      }
    }
  }
};

template <typename Kind>
struct Few {
  const LinearArguments& a;
  int64_t stride;      // of a prepared row
  int64_t row_bytes;   // of a weight
  int64_t outputs;     // of a piece
  float* factors;      // [rows]
  typename Kind::Active* x;  // [rows, stride], zeros behind the inputs

  explicit Few(const LinearArguments& a) : a(a) {
    stride = Kind::Stride(a.inputs);
    row_bytes = a.inputs / Kind::PACKED * sizeof(typename Kind::Weight);
    outputs = Least(RoundUp(kPieceBytes / row_bytes + 1, kTile), kTogether);
    x = static_cast<typename Kind::Active*>(a.scratch);
    factors = reinterpret_cast<float*>(x + a.rows * stride);
  }

  int64_t Bytes() const { return a.rows * (stride * sizeof *x + sizeof *factors); }

  void PrepareRow(int64_t row) const {
    typename Kind::Active* out = x + row * stride;
    const int64_t behind = stride < 2 * Kind::STEP ? stride : 2 * Kind::STEP;
    memset(out + (stride - behind), 0, behind * sizeof *out);  // what has no inputs
    factors[row] = Prepare<Kind>(a, row * a.inputs, out);
  }

  template <int ROWS, int OUTPUTS>
  void Add(const Weight& weight, int64_t row, int64_t output, Sums<ROWS, OUTPUTS>& totals) const {
    const char* w = static_cast<const char*>(weight.data) + output * row_bytes;
    const auto* weights = reinterpret_cast<const typename Kind::Weight*>(w);
    const auto* active = x + row * stride;
    if constexpr (Kind::PACKED > 1) {
      const BFloat16* scales = static_cast<const BFloat16*>(weight.scale) + output * (a.inputs / a.group);
      const GroupedTile<ROWS, OUTPUTS> tile(weights, a.inputs, active, stride, scales, a.group);
      memcpy(totals, tile.totals, sizeof totals);
    } else {
      Tile<Kind, ROWS, OUTPUTS>(Kind{}, weights, a.inputs, active, stride, totals);
    }
  }

  // Vectors are summed kLanes at once, if there are so many.
  template <int ROWS>
  void Multiply(const Weight& weight, int64_t row, int64_t first, int64_t count, float (&sums)[ROWS][kTogether]) const {
    constexpr int kOutputs = kLanes / ROWS / kTile * kTile;
    int64_t at = 0;
    for (; at + kOutputs <= count; at += kOutputs) {
      Floats all[kLanes] = {};
      for (int i = 0; i < kOutputs; i += kTile) {
        Sums<ROWS, kTile> totals = {};
        Add<ROWS, kTile>(weight, row, first + at + i, totals);
        UNROLL for (int j = 0; j < ROWS; ++j) memcpy(all + j * kOutputs + i, totals[j], sizeof totals[j]);
      }
      const Floats results = Totals(all);
      UNROLL for (int j = 0; j < ROWS; ++j)
        memcpy(sums[j] + at, reinterpret_cast<const float*>(&results) + j * kOutputs, kOutputs * sizeof(float));
    }
    for (; at < count; ++at) {
      Sums<ROWS, 1> totals = {};
      Add<ROWS, 1>(weight, row, first + at, totals);
      for (int j = 0; j < ROWS; ++j) sums[j][at] = Total(totals[j][0]);
    }
  }

  template <int ROWS>
  void Rows(int part, int64_t row, int64_t first, int64_t count) const {
    float sums[2][ROWS][kTogether];
    for (int i = 0; i < 1 + a.Gated(); ++i) Multiply<ROWS>(a.weights[part + i], row, first, count, sums[i]);
    for (int i = 0; i < ROWS; ++i)
      Store(a, a.weights[part], row + i, factors[row + i], first, count, sums[0][i], sums[1][i]);
  }

  void Piece(int part, int64_t piece) const {
    const int64_t first = piece * outputs, count = Least(a.weights[part].outputs - first, outputs);
    int64_t row = 0;
    for (; row + kTile <= a.rows; row += kTile) Rows<kTile>(part, row, first, count);
    switch (a.rows - row) {
      case 3: return Rows<3>(part, row, first, count);
      case 2: return Rows<2>(part, row, first, count);
      case 1: return Rows<1>(part, row, first, count);
    }
  }

  void Run(const Pool& pool) const {
    ForEach(pool, a.rows, [this](int64_t row) { PrepareRow(row); });
    const Pieces pieces(a, outputs);
    ForEach(pool, pieces.count, [&](int64_t i) {
      const auto [part, piece] = pieces.At(i);
      Piece(part, piece);
    });
  }
};

}  // namespace
}  // namespace neuronx::NEURONX_LEVEL
