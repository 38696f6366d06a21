// Products of many rows of activations. Rows enough to lay the weights out anew, as the processor multiplies fastest:
// a panel holds one word, of 32 bits, of each of kAcross outputs, then the next word of each. What weights are in the
// panel is made of whatever they are stored as, so all kinds of weights are multiplied alike.
#pragma once

#include "linear.h"

namespace neuronx::NEURONX_LEVEL {
namespace {

// A square of words: to[i][j] = from[j][i].
inline void Transpose(const uint32_t* from, int64_t pitch, uint32_t* to, int64_t to_pitch) {
#if defined(__AVX512F__)
  // Four times each row of the upper half is zipped with one of the lower half.
  const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  __m512i rows[16], zipped[16];
  UNROLL16 for (int i = 0; i < 16; ++i) rows[i] = _mm512_loadu_si512(from + i * pitch);
  UNROLL for (int turn = 0; turn < 4; ++turn) {
    UNROLL for (int i = 0; i < 8; ++i) {
      zipped[2 * i] = _mm512_permutex2var_epi32(rows[i], low, rows[i + 8]);
      zipped[2 * i + 1] = _mm512_permutex2var_epi32(rows[i], high, rows[i + 8]);
    }
    UNROLL16 for (int i = 0; i < 16; ++i) rows[i] = zipped[i];
  }
  UNROLL16 for (int i = 0; i < 16; ++i) _mm512_storeu_si512(to + i * to_pitch, rows[i]);
#else
  for (int i = 0; i < kLanes; ++i)
    for (int j = 0; j < kLanes; ++j) to[i * to_pitch + j] = from[j * pitch + i];
#endif
}

// `count` numbers as others; behind them zeros up to a whole vector.
template <typename From, typename To>
inline void Rewrite(const From* from, int64_t count, To* to) {
  for (int64_t i = 0; i < count; i += kLanes) Put(Some(from + i, count - i), to + i);
}
inline void Rewrite(const BFloat16* from, int64_t count, BFloat16* to) { memcpy(to, from, count * sizeof *from); }

template <typename Kind>
struct Many {
  using Number = typename Kind::Active;
  static constexpr int kVectors = 3, kRows = kLanes == 16 ? 8 : 4;
  static constexpr int64_t kPer = 4 / sizeof(Number);  // numbers in a word
  static constexpr int64_t kAcross = kVectors * kLanes, kWords = 256, kInputs = kWords * kPer, kBlock = 256;
  static constexpr int64_t kApart = 64 / sizeof(Number);

  const LinearArguments& a;
  int64_t stride;  // of a prepared row; rows must not lie whole pages apart, or take each other's place in the cache
  Number* x;       // [rows, stride], zeros behind the inputs

  explicit Many(const LinearArguments& a)
      : a(a), stride(Kind::Stride(a.inputs) + kApart), x(static_cast<Number*>(a.scratch)) {}

  int64_t Bytes() const { return a.rows * stride * sizeof *x; }

  void PrepareRow(int64_t row) const {
    const int64_t whole = a.inputs / Kind::STEP * Kind::STEP;
    memset(x + row * stride + whole, 0, (stride - whole) * sizeof *x);
    Prepare<Kind>(a, row * a.inputs, x + row * stride);
  }

  // Some outputs of one weight, or of a gate and of what is gated, for some rows.
  void Piece(int part, int64_t output, int64_t row) const {
    alignas(64) float sums[2][kBlock][kAcross];
    const int64_t outputs = Least(a.weights[part].outputs - output, kAcross), rows = Least(a.rows - row, kBlock);
    for (int i = 0; i < 1 + a.Gated(); ++i) Multiply(a.weights[part + i], output, outputs, row, rows, sums[i]);
    for (int64_t i = 0; i < rows; ++i)
      Store(a, a.weights[part], row + i, 1, output, outputs, sums[0][i], sums[1][i]);
  }

  void Multiply(const Weight& weight, int64_t output, int64_t outputs, int64_t row, int64_t rows,
                float (*sums)[kAcross]) const {
    alignas(64) Number panel[kWords * kAcross * kPer];
    for (int64_t input = 0; input < a.inputs; input += kInputs) {
      const int64_t inputs = Least(a.inputs - input, kInputs), words = RoundUp(inputs, kPer * kLanes) / kPer;
      for (int64_t i = 0; i < kAcross; i += kLanes)
        LayOut(weight, output + i, outputs - i, input, inputs, panel + i * kPer);
      const Number* active = x + row * stride + input;
      for (int64_t i = 0; i < rows; i += kRows) Rows<kRows>(rows - i, panel, words, active + i * stride, sums + i, !input);
    }
  }

  // kLanes outputs, of which there are `outputs`, in a panel.
  void LayOut(const Weight& weight, int64_t output, int64_t outputs, int64_t input, int64_t inputs, Number* panel) const {
    constexpr int64_t kPitch = kWords + 16;
    alignas(64) uint32_t rows[kLanes][kPitch];
    const int64_t words = RoundUp(inputs, kPer * kLanes) / kPer;
    for (int64_t i = 0; i < kLanes; ++i) {
      if (i >= outputs || inputs < words * kPer) memset(rows[i], 0, words * sizeof rows[i][0]);
      if (i < outputs) Write(weight, output + i, input, inputs, reinterpret_cast<Number*>(rows[i]));
    }
    for (int64_t word = 0; word < words; word += kLanes)
      Transpose(rows[0] + word, kPitch, reinterpret_cast<uint32_t*>(panel) + word * kAcross, kAcross);
  }

  // Some inputs of an output.
  void Write(const Weight& weight, int64_t output, int64_t input, int64_t count, Number* to) const {
    const int64_t first = output * a.inputs + input;
    switch (a.weight_type) {
      case Type::kF32: return Rewrite(static_cast<const float*>(weight.data) + first, count, to);
      case Type::kBF16: return Rewrite(static_cast<const BFloat16*>(weight.data) + first, count, to);
      case Type::kF16: return Rewrite(static_cast<const Float16*>(weight.data) + first, count, to);
      case Type::kS8: return Rewrite(static_cast<const int8_t*>(weight.data) + first, count, to);
      case Type::kS4: return WriteGroups(weight, output, input, count, to);
    }
  }

  // Scales included.
  void WriteGroups(const Weight& weight, int64_t output, int64_t input, int64_t count, Number* to) const {
    const int64_t half = a.group / 2;  // groups are powers of two
    const int shift = __builtin_ctzll(a.group);
    const BFloat16* scales = static_cast<const BFloat16*>(weight.scale) + output * (a.inputs >> shift);
    const int8_t* row = static_cast<const int8_t*>(weight.data) + output * (a.inputs / 2);
    for (int64_t i = input; i < input + count; i += BLOCK) {
      const int64_t group = i >> shift, inside = i & (a.group - 1);
      const float scale = AsFloat(scales[group]);
      const int8_t* from = row + group * half + (inside & (half - 1));
      const int upper = inside < half ? 0 : 4;
      for (int64_t j = 0; j < BLOCK; j += kLanes) {
        const Ints values = (((Whole(from + j) >> upper) & 15) ^ 8) - 8;
        Put(AsFloats(values) * scale, to + i - input + j);
      }
    }
  }

  // ROWS rows of activations times a panel.
  template <int ROWS>
  void Rows(int64_t rows, const Number* panel, int64_t words, const Number* active, float (*sums)[kAcross],
            bool first) const {
    if constexpr (ROWS > 1)
      if (rows < ROWS) return Rows<ROWS - 1>(rows, panel, words, active, sums, first);
    Floats totals[ROWS][kVectors] = {};
    for (int64_t word = 0; word < words; ++word, panel += kAcross * kPer) {
      typename Kind::Vector weights[kVectors];
      UNROLL for (int i = 0; i < kVectors; ++i) weights[i] = Kind::LoadWeight(panel + i * kLanes * kPer);
      UNROLL for (int row = 0; row < ROWS; ++row) {
        const auto same = Kind::Repeat(active + row * stride + word * kPer);
        UNROLL for (int i = 0; i < kVectors; ++i) totals[row][i] = Kind::Add(totals[row][i], weights[i], same);
      }
    }
    UNROLL for (int row = 0; row < ROWS; ++row)
      UNROLL for (int i = 0; i < kVectors; ++i) {
        const Floats sum = first ? totals[row][i] : totals[row][i] + Load<Floats>(sums[row] + i * kLanes);
        memcpy(sums[row] + i * kLanes, &sum, sizeof sum);
      }
  }

  void Run(const Pool& pool) const {
    ForEach(pool, a.rows, [this](int64_t row) { PrepareRow(row); });
    const int64_t blocks = RoundUp(a.rows, kBlock) / kBlock;
    const Pieces panels(a, kAcross);
    ForEach(pool, panels.count * blocks, [&](int64_t i) {
      const auto [part, panel] = panels.At(i / blocks);
      Piece(part, panel * kAcross, i % blocks * kBlock);
    });
  }
};

}  // namespace
}  // namespace neuronx::NEURONX_LEVEL
