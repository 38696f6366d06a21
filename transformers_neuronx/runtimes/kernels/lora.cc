// What low-rank adapters add to the results of a linear layer, as in `layers/lora.py`.
//
// Each row is computed by itself and in one order of sums, so it does not depend on its neighbours.
#include "lanes.h"

namespace neuronx::NEURONX_LEVEL {
namespace {

constexpr int kSums = 8;  // that are independent of each other, as a processor adds several at a time

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

  // Adds products of what a row has hidden and kSums vectors of columns of its adapter's b.
  void AddTo(int64_t row, int64_t output) const {
    const Number* up = static_cast<const Number*>(a.b) + Adapter(row) * a.rank * a.outputs + output;
    const int64_t left = a.outputs - output, at = row * a.outputs + output;
    Floats sums[kSums] = {};
    if (left >= kSums * kLanes) {
      for (int64_t i = 0; i < a.rank; ++i, up += a.outputs)
        UNROLL for (int j = 0; j < kSums; ++j) sums[j] += Hidden(row)[i] * Widened(up + j * kLanes);
    } else {
      for (int64_t i = 0; i < a.rank; ++i, up += a.outputs)
        for (int j = 0; j * kLanes < left; ++j) sums[j] += Hidden(row)[i] * Some(up + j * kLanes, left - j * kLanes);
    }
    for (int j = 0; j < kSums && j * kLanes < left; ++j) {
      const int64_t count = left - j * kLanes;
      PutSome(Some(a.y, a.y_type, at + j * kLanes, count) + sums[j], a.y_type, count, a.y, at + j * kLanes);
    }
  }

  void Run(const Pool& pool) const {
    bool any = false;
    for (int64_t row = 0; row < a.rows; row += a.together) any = any || Adapter(row) >= 0;
    if (!any) return;
    const int64_t turns = (a.rank + kSums - 1) / kSums, columns = kSums * kLanes;
    ForEach(pool, a.rows * turns, [&](int64_t piece) {
      const int64_t row = piece / turns, first = piece % turns * kSums;
      if (Adapter(row) < 0) return;
      if (first + kSums <= a.rank) return Multiply<kSums>(row, first);
      for (int64_t i = first; i < a.rank; ++i) Multiply<1>(row, i);
    });
    ForEach(pool, (a.outputs + columns - 1) / columns, [&](int64_t piece) {
      for (int64_t row = 0; row < a.rows; ++row)
        if (Adapter(row) >= 0) AddTo(row, piece * columns);
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
