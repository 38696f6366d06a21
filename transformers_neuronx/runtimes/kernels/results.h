// Turns sums of products into results of a linear layer, and divides outputs into pieces that threads work on.
#pragma once

#include "kinds.h"

namespace neuronx::NEURONX_LEVEL {
namespace {

constexpr int kMostSums = 32;  // that are stored at once: rows times columns

// 1 / x, for an x of at least 1.
inline Floats Inverse(Floats x) {
#if defined(__AVX512F__)
  const Floats y = Cast<Floats>(_mm512_rcp14_ps(Cast<__m512>(x)));
  return y * (2 - x * y);
#else
  return 1 / x;
#endif
}

// At least exp(-80): subnormal numbers take processors a hundred times as long.
inline Floats Logistic(Floats x) { return Inverse(1 + Exp(x < -80 ? Floats{} + 80 : -x)); }

// The error function, within 1.5e-7 (Abramowitz and Stegun, 7.1.26).
inline Floats Erf(Floats x) {
  const Floats size = x < 0 ? -x : x, t = Inverse(1 + 0.3275911f * size);
  constexpr float kFactors[] = {1.061405429f, -1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f};
  Floats sum = {};
  UNROLL for (int i = 0; i < 5; ++i) sum = (sum + kFactors[i]) * t;
  const Floats y = 1 - sum * Exp(-size * size);
  return x < 0 ? -y : y;
}

inline Floats Activated(Activation activation, Floats x) {
  switch (activation) {
    case Activation::kNone: return x;
    case Activation::kGelu: return 0.5f * x * (1 + Erf(x * 0.707106781f));
    case Activation::kGeluTanh:  // 1 + tanh(y) is twice the logistic function of 2 y; 2 sqrt(2 / pi) is 1.5957691
      return x * Logistic(1.595769122f * (x + 0.044715f * x * x * x));
    case Activation::kRelu: return x < 0 ? Floats{} : x;
    case Activation::kRelu2: return x < 0 ? Floats{} : x * x;
    case Activation::kSilu: return x * Logistic(x);
    case Activation::kTanh: return 2 * Logistic(2 * x) - 1;
  }
  return x;
}

// Applies the scales and biases of `count` outputs of a weight to sums [rows, columns].
inline void Complete(const LinearArguments& a, const Weight& weight, int64_t output, int64_t count, int rows,
                     int columns, const float* factors, const Floats* sums, Floats* y) {
  for (int j = 0; j < columns; ++j, output += kLanes, count = count > kLanes ? count - kLanes : 0) {
    const bool scaled = weight.scale && !a.group;
    const Floats scale = scaled ? Some(static_cast<const float*>(weight.scale) + output, count) : Floats{} + 1;
    const Floats bias = weight.bias ? Some(weight.bias, a.x_type, output, count) : Floats{};
    for (int i = 0; i < rows; ++i) y[i * columns + j] = sums[i * columns + j] * (scale * factors[i]) + bias;
  }
}

// Stores the results of some rows, with `count` outputs of each from `first` on. `sums` [rows, columns] are the
// weight's. If it is a gate, `up` are the next weight's. Not inlined, so that loops over products have all registers.
// Each step has its own loop, so that no loop branches.
[[maybe_unused]] __attribute__((noinline)) void Store(const LinearArguments& a, const Weight& weight, int64_t row, int rows,
                                     const float* factors, int64_t first, int64_t count, int columns,
                                     const Floats* sums, const Floats* up) {
  Floats y[kMostSums], gated[kMostSums];
  Complete(a, weight, first, count, rows, columns, factors, sums, y);
  if (a.activation != Activation::kNone)
    for (int i = 0; i < rows * columns; ++i) y[i] = Activated(a.activation, y[i]);
  if (a.Gated()) {
    Complete(a, (&weight)[1], first, count, rows, columns, factors, up, gated);
    for (int i = 0; i < rows * columns; ++i) y[i] *= gated[i];
  }
  for (int i = 0; i < rows; ++i)
    for (int j = 0; j < columns && j * kLanes < count; ++j) {
      const int64_t at = (row + i) * weight.outputs + first + j * kLanes, left = count - j * kLanes;
      if (a.residual) y[i * columns + j] += Some(a.residual, a.y_type, at, left);
      PutSome(y[i * columns + j], a.y_type, left, weight.y, at);
    }
}

// Scales and minima of groups of inputs, `count` of them for an output. Or they are whole numbers, and `block` groups share a
// unit.
struct Groups {
  Type type = Type::kF32;
  int64_t count = 0, block = 1, units = 0;

  Groups() = default;
  Groups(const LinearArguments& a, int64_t count)
      : type(a.scale_type), count(count), block(a.block ? a.block / a.group : count), units(count / block) {}

  // Those of one group and a vector of a panel's outputs. With units, it is a product without rounding.
  Floats Of(const void* parts, const void* of_units, int64_t panel, int64_t group, int64_t unit, int column) const {
    const int64_t at = (panel * count + group) * kPanel + column * kLanes;
    if (!of_units) return At(parts, at);
    const int64_t unit_at = (panel * units + unit) * kPanel + column * kLanes;
    return Widened(static_cast<const int8_t*>(parts) + at) * At(of_units, unit_at);
  }

 private:
  Floats At(const void* parts, int64_t at) const {
    switch (type) {
      case Type::kBF16: return Widened(static_cast<const BFloat16*>(parts) + at);
      case Type::kF16: return Widened(static_cast<const Float16*>(parts) + at);
      default: return Widened(static_cast<const float*>(parts) + at);
    }
  }
};

// The outputs of all weights, in pieces of `panels` panels. A gated weight has no pieces of its own.
struct Pieces {
  int64_t panels = 1, of_part[kMostParts] = {}, count = 0;

  Pieces() = default;
  Pieces(const LinearArguments& a, int64_t panels) : panels(panels) {
    for (int part = 0; part < (a.Gated() ? 1 : a.parts); ++part)
      count += of_part[part] = RoundUp(a.weights[part].outputs, panels * kPanel) / (panels * kPanel);
  }

  struct Place { int part; int64_t panel; };
  Place At(int64_t piece) const {
    int part = 0;
    for (; piece >= of_part[part]; ++part) piece -= of_part[part];
    return {part, piece * panels};
  }
};

// Computes a product: prepares its rows, and then works on its pieces.
template <typename Product>
void Run(const Product& product, const Pool& pool) {
  ForEach(pool, product.Start(), [&](int64_t row) { product.PrepareRow(row); });
  ForEach(pool, product.Count(), [&](int64_t piece) { product.WorkPiece(piece); });
}

}  // namespace
}  // namespace neuronx::NEURONX_LEVEL
