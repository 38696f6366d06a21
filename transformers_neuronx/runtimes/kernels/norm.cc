// Normalizations over the last axis, as in `layers/norm.py`.
#include "lanes.h"

namespace neuronx::NEURONX_LEVEL {
namespace {

template <typename Number>
struct Norm {
  const NormArguments& a;

  // The mean over a row of `function`, which is applied to vectors of numbers.
  template <typename Function>
  float Mean(const Number* x, const Function& function) const {
    Floats sums = {};
    int64_t i = 0;
    for (; i + kLanes <= a.size; i += kLanes) sums += function(Widened(x + i));
    if (i < a.size)
      sums += Count() < static_cast<int32_t>(a.size - i) ? function(Some(x + i, a.size - i)) : Floats{};
    return Total(sums) / static_cast<float>(a.size);
  }

  void Row(int64_t row) const {
    const Number* x = static_cast<const Number*>(a.x) + row * a.size;
    Number* y = static_cast<Number*>(a.y) + row * a.size;
    const float mean = a.bias ? Mean(x, [](Floats x) { return x; }) : 0;
    const float square = Mean(x, [mean](Floats x) { return (x - mean) * (x - mean); });
    const float factor = 1 / __builtin_sqrtf(square + a.eps);
    for (int64_t i = 0; i < a.size; i += kLanes) {
      const int64_t left = a.size - i;
      const Floats scaled = (Some(x + i, left) - mean) * factor * Some(a.weight + i, left);
      PutSome(a.bias ? scaled + Some(a.bias + i, left) : scaled, left, y + i);
    }
  }

  void Run(const Pool& pool) const {
    constexpr int64_t kTogether = 8;  // rows, since one is too little work for a thread
    ForEach(pool, (a.rows + kTogether - 1) / kTogether, [this](int64_t piece) {
      for (int64_t row = piece * kTogether; row < Least(a.rows, (piece + 1) * kTogether); ++row) Row(row);
    });
  }
};

}  // namespace

void Normalize(const NormArguments& a, const Pool& pool) {
  if (a.type == Type::kF32) return Norm<float>{a}.Run(pool);
  if (a.type == Type::kF16) return Norm<Float16>{a}.Run(pool);
  Norm<BFloat16>{a}.Run(pool);
}

}  // namespace neuronx::NEURONX_LEVEL
