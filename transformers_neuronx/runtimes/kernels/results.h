// What becomes of sums of products: results of a linear layer; and the pieces that threads work on.
#pragma once

#include "kinds.h"

namespace neuronx::NEURONX_LEVEL {
namespace {

// Of what is at least 1.
inline Floats Inverse(Floats x) {
#if defined(__AVX512F__)
  const Floats y = Cast<Floats>(_mm512_rcp14_ps(Cast<__m512>(x)));
  return y * (2 - x * y);
#else
  return 1 / x;
#endif
}

// No smaller than e to the power of -80: what is below normal numbers takes processors a hundred times as long.
inline Floats Logistic(Floats x) { return Inverse(1 + Exp(x < -80 ? Floats{} + 80 : -x)); }

// Within 1.5e-7 (Abramowitz and Stegun, 7.1.26).
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
    case Activation::kSilu: return x * Logistic(x);
    case Activation::kTanh: return 2 * Logistic(2 * x) - 1;
  }
  return x;
}

// What completes the sums of kLanes outputs of a weight, of which there are `count`.
struct Completion {
  const Floats scale, bias;

  Completion(const LinearArguments& a, const Weight& weight, int64_t output, int64_t count)
      : scale(weight.scale && !a.group ? Some(static_cast<const float*>(weight.scale) + output, count) : Floats{} + 1),
        bias(weight.bias ? Some(weight.bias, a.x_type, output, count) : Floats{}) {}

  Floats operator()(Floats sums, float factor) const { return sums * (scale * factor) + bias; }
};

// Stores the results of some rows, of each `count` outputs from `first` on. `sums` [rows, columns] are those of the
// weight, and `up` those of the next one where the first is a gate.
inline void Store(const LinearArguments& a, const Weight& weight, int64_t row, int rows, const float* factors,
                  int64_t first, int64_t count, int columns, const Floats* sums, const Floats* up) {
  for (int column = 0; column * kLanes < count && column < columns; ++column) {
    const int64_t output = first + column * kLanes, left = count - column * kLanes;
    const Completion complete(a, weight, output, left), complete_up(a, (&weight)[a.Gated()], output, left);
    for (int i = 0; i < rows; ++i) {
      Floats y = Activated(a.activation, complete(sums[i * columns + column], factors[i]));
      if (a.Gated()) y *= complete_up(up[i * columns + column], factors[i]);
      const int64_t at = (row + i) * weight.outputs + output;
      if (a.residual) y += Some(a.residual, a.y_type, at, left);
      PutSome(y, a.y_type, left, weight.y, at);
    }
  }
}

// The outputs of all weights, in pieces of some panels. What is gated has none of its own.
struct Pieces {
  int64_t panels, of_part[kMostParts] = {}, count = 0;

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

}  // namespace
}  // namespace neuronx::NEURONX_LEVEL
