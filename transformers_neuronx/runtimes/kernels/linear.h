// What products of few and of many rows share: activations are prepared, outputs divided into pieces, and results
// completed before they are stored.
#pragma once

#include "kinds.h"

namespace neuronx::NEURONX_LEVEL {
namespace {

// The outputs of all weights in pieces of one size. What is gated has none of its own.
struct Pieces {
  int64_t of_part[kMostParts] = {}, count = 0;

  Pieces(const LinearArguments& a, int64_t size) {
    for (int part = 0; part < (a.Gated() ? 1 : a.parts); ++part)
      count += of_part[part] = (a.weights[part].outputs + size - 1) / size;
  }

  struct Place { int part; int64_t piece; };
  Place At(int64_t piece) const {
    int part = 0;
    for (; piece >= of_part[part]; ++part) piece -= of_part[part];
    return {part, piece};
  }
};

// Activations.

// A row of activations as a Kind has them. Returns what its results have to be multiplied by.
template <typename Kind>
float Prepare(const LinearArguments& a, int64_t first, float* out) {
  Widen(a.x, a.x_type, first, a.inputs, out);
  return 1;
}

template <typename Kind>
float Prepare(const LinearArguments& a, int64_t first, BFloat16* out) {
  memcpy(out, static_cast<const BFloat16*>(a.x) + first, a.inputs * sizeof *out);
  return 1;
}

// In integers. What is not finite reaches every result, as NaN.
template <typename Kind, typename Active>
float PrepareIntegers(const LinearArguments& a, int64_t first, Active* out) {
  const auto load = [&](int64_t i, float (&block)[BLOCK]) {
    const int64_t count = a.inputs - i < BLOCK ? a.inputs - i : BLOCK;
    memset(block, 0, sizeof block);
    Widen(a.x, a.x_type, first + i, count, block);
  };
  float block[BLOCK];
  Ints bits = {};  // of the largest: sizes are ordered as their bits are, and what is not finite comes last
  for (int64_t i = 0; i < a.inputs; i += BLOCK) {
    load(i, block);
    for (int64_t j = 0; j < BLOCK; j += kLanes) {
      const Ints size = Load<Ints>(block + j) & 0x7fffffff;
      bits = size > bits ? size : bits;
    }
  }
  int32_t most = 0;
  for (int lane = 0; lane < kLanes; ++lane) most = bits[lane] > most ? bits[lane] : most;
  const bool finite = most < 0x7f800000;
  const float largest = Cast<float>(most);
  const float inverse = finite && largest > 1e-30f ? Kind::LARGEST / largest : 0;  // beyond that it would be infinite
  for (int64_t i = 0; i < a.inputs; i += BLOCK) {
    load(i, block);
    int32_t whole[BLOCK] = {};
    for (int64_t j = 0; j < BLOCK && finite; j += kLanes) {
      const Ints some = Rounded(Load<Floats>(block + j) * inverse);
      memcpy(whole + j, &some, sizeof some);
    }
    Kind::Store(whole, i, a.group, out);
  }
  Kind::Finish(out, a.inputs);
  return finite ? largest / Kind::LARGEST : __builtin_nanf("");
}

template <typename Kind>
float Prepare(const LinearArguments& a, int64_t first, int16_t* out) {
  return PrepareIntegers<Kind>(a, first, out);
}

template <typename Kind>
float Prepare(const LinearArguments& a, int64_t first, int8_t* out) {
  return PrepareIntegers<Kind>(a, first, out);
}

// Results.

constexpr int64_t kTogether = 256;  // results of a row that are completed together, at most

inline Floats Logistic(Floats x) { return 1 / (1 + Exp(-x)); }

// Within 1.5e-7 (Abramowitz and Stegun, 7.1.26).
inline Floats Erf(Floats x) {
  const Floats size = x < 0 ? -x : x, t = 1 / (1 + 0.3275911f * size);
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

// The sums of a row and kLanes outputs, of which there are `count`, scaled and with the bias.
inline Floats Completed(const LinearArguments& a, const Weight& weight, float factor, int64_t output, int64_t count,
                        Floats sums) {
  const float* scale = a.group ? nullptr : static_cast<const float*>(weight.scale);
  sums *= scale ? Some(scale + output, count) * factor : Floats{} + factor;
  if (!weight.bias) return sums;
  return sums + Some(weight.bias, a.x_type, output, count);
}

// Stores results of a row, `count` of them from output `first` on. `sums` are those of the weight, and `up` those of the
// next one where the first is a gate; there is room in both up to a whole vector.
inline void Store(const LinearArguments& a, const Weight& weight, int64_t row, float factor, int64_t first,
                  int64_t count, const float* sums, const float* up) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const int64_t left = count - i;
    Floats y = Completed(a, weight, factor, first + i, left, Load<Floats>(sums + i));
    y = Activated(a.activation, y);
    if (a.Gated()) y *= Completed(a, (&weight)[1], factor, first + i, left, Load<Floats>(up + i));
    PutSome(y, a.y_type, left, weight.y, row * weight.outputs + first + i);
  }
}

}  // namespace
}  // namespace neuronx::NEURONX_LEVEL
