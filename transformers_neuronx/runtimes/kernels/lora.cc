// What low-rank adapters add to the results of a linear layer, as in `layers/lora.py`.
//
// Each row is computed by itself and in one order of sums, so it does not depend on its neighbours.
#include "lanes.h"

namespace neuronx::NEURONX_LEVEL {
namespace {

constexpr int kSums = 8;            // that are independent of each other, as a processor adds several at a time
constexpr int64_t kColumns = 1024;  // of b at a time: longer runs are streams, which processors read ahead

template <typename Number>
struct Lora {
  const LoraArguments& a;

  int64_t Adapter(int64_t row) const {
    const int64_t adapter = a.adapter[row / a.together];
    return adapter < a.adapters ? adapter : -1;
  }

  float* Hidden(int64_t row) const { return static_cast<float*>(a.scratch) + row * a.rank; }

  // Products of a row of x and COUNT adjacent rows of its adapter's a.
  template <int COUNT>
  void Multiply(int64_t row, int64_t first) const {
    const Number* x = static_cast<const Number*>(a.x) + row * a.inputs;
    const Number* down = static_cast<const Number*>(a.a) + (Adapter(row) * a.rank + first) * a.inputs;
    Floats sums[COUNT] = {};
    int64_t i = 0;
    for (; i + kLanes <= a.inputs; i += kLanes) {
      const Floats some = Widened(x + i);
      UNROLL for (int j = 0; j < COUNT; ++j) sums[j] += some * Widened(down + j * a.inputs + i);
    }
    if (i < a.inputs) {
      const Floats some = Some(x + i, a.inputs - i);
      for (int j = 0; j < COUNT; ++j) sums[j] += some * Some(down + j * a.inputs + i, a.inputs - i);
    }
    for (int j = 0; j < COUNT; ++j) Hidden(row)[first + j] = Total(sums[j]);
  }

  // Adds to sums of columns the products of COUNT hidden numbers and as many adjacent rows of b.
  template <int COUNT>
  void Sum(const float* hidden, const Number* up, int64_t columns, Floats* sums) const {
    int64_t i = 0;
    for (; i + kLanes <= columns; i += kLanes, ++sums)
      UNROLL for (int j = 0; j < COUNT; ++j) *sums += hidden[j] * Widened(up + j * a.outputs + i);
    if (i < columns)
      for (int j = 0; j < COUNT; ++j) *sums += hidden[j] * Some(up + j * a.outputs + i, columns - i);
  }

  // Adds products of what a row has hidden and some columns of its adapter's b.
  void AddTo(int64_t row, int64_t first) const {
    const Number* up = static_cast<const Number*>(a.b) + Adapter(row) * a.rank * a.outputs + first;
    const int64_t columns = Least(kColumns, a.outputs - first), at = row * a.outputs + first;
    Floats sums[kColumns / kLanes] = {};
    int64_t i = 0;
    for (; i + kSums <= a.rank; i += kSums) Sum<kSums>(Hidden(row) + i, up + i * a.outputs, columns, sums);
    for (; i < a.rank; ++i) Sum<1>(Hidden(row) + i, up + i * a.outputs, columns, sums);
    for (i = 0; i < columns; i += kLanes) {
      const int64_t left = columns - i;
      PutSome(Some(a.y, a.y_type, at + i, left) + sums[i / kLanes], a.y_type, left, a.y, at + i);
    }
  }

  void Run(const Pool& pool) const {
    bool any = false;
    for (int64_t row = 0; row < a.rows; row += a.together) any = any || Adapter(row) >= 0;
    if (!any) return;
    const int64_t turns = (a.rank + kSums - 1) / kSums, parts = (a.outputs + kColumns - 1) / kColumns;
    ForEach(pool, a.rows * turns, [&](int64_t piece) {
      const int64_t row = piece / turns, first = piece % turns * kSums;
      if (Adapter(row) < 0) return;
      if (first + kSums <= a.rank) return Multiply<kSums>(row, first);
      for (int64_t i = first; i < a.rank; ++i) Multiply<1>(row, i);
    });
    ForEach(pool, parts * a.rows, [&](int64_t piece) {
      const int64_t row = piece % a.rows;  // rows of one adapter read the same columns, one after the other
      if (Adapter(row) >= 0) AddTo(row, piece / a.rows * kColumns);
    });
  }
};

}  // namespace

int64_t LoraScratch(const LoraArguments& a) { return a.rows * a.rank * static_cast<int64_t>(sizeof(float)); }

void AddAdapters(const LoraArguments& a, const Pool& pool) {
  if (a.x_type == Type::kF32) return Lora<float>{a}.Run(pool);
  if (a.x_type == Type::kF16) return Lora<Float16>{a}.Run(pool);
  Lora<BFloat16>{a}.Run(pool);
}

}  // namespace neuronx::NEURONX_LEVEL
