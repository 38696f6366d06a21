// Linear layers of experts: each row of x is multiplied by the matrix of its expert.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels.h"

namespace neuronx {

// Bytes from the weight of an expert, and from what belongs to it, to those of the next.
struct Stride {
  int64_t data, scale, minimum, scale_unit, minimum_unit, bias;
};

// The rows of each expert, in ascending order. Rows whose number is that of no expert have none.
class Routed {
 public:
  Routed(const int32_t* experts, int64_t rows, int64_t count) : first_(count + 2) {
    const auto own = [&](int64_t row) { return experts[row] >= 0 && experts[row] < count ? experts[row] : count; };
    for (int64_t row = 0; row < rows; ++row) ++first_[own(row) + 1];
    for (int64_t expert = 0; expert <= count; ++expert) first_[expert + 1] += first_[expert];
    rows_.resize(rows);
    std::vector<int64_t> next = first_;
    for (int64_t row = 0; row < rows; ++row) rows_[next[own(row)]++] = row;
  }

  int64_t Experts() const { return static_cast<int64_t>(first_.size()) - 2; }
  int64_t Count(int64_t expert) const { return first_[expert + 1] - first_[expert]; }
  const int64_t* Rows(int64_t expert) const { return rows_.data() + first_[expert]; }  // at Experts(), those without one
  bool Adjacent(int64_t expert) const { return Rows(expert)[Count(expert) - 1] - Rows(expert)[0] == Count(expert) - 1; }

  int64_t Most() const {
    int64_t most = 0;
    for (int64_t expert = 0; expert < Experts(); ++expert) most = std::max(most, Count(expert));
    return most;
  }

 private:
  std::vector<int64_t> first_, rows_;
};

// A linear layer for the rows of one expert after the other. Rows that are not adjacent are copied to be, and back.
class Gathered {
 public:
  template <typename Scratch>
  Gathered(const LinearArguments& all, const Routed& routed, int64_t x_width, int64_t y_width, const Scratch& scratch)
      : all_(all), routed_(routed), results_(all.activation == Activation::kNone ? all.parts : 1), y_width_(y_width) {
    LinearArguments largest = all;
    largest.rows = routed.Most();
    x_row_ = all.inputs * x_width;
    own_ = Aligned(scratch(largest));
    x_ = Aligned(largest.rows * x_row_);
    for (int part = 0; part < results_; ++part) y_[part] = Aligned(largest.rows * Row(part));
  }

  int64_t Bytes() const {
    int64_t bytes = own_ + x_;
    for (int part = 0; part < results_; ++part) bytes += y_[part];
    return bytes;
  }

  // Calls linear(arguments) for each expert that has rows.
  template <typename Linear>
  void Run(const Stride* strides, void* scratch, const Linear& linear) const {
    for (int64_t expert = 0; expert < routed_.Experts(); ++expert)
      if (routed_.Count(expert) > 0) RunOne(expert, strides, static_cast<char*>(scratch), linear);
    const int64_t none = routed_.Experts();
    for (int part = 0; part < results_; ++part)
      for (int64_t i = 0; i < routed_.Count(none); ++i) std::memset(Result(part, routed_.Rows(none)[i]), 0, Row(part));
  }

 private:
  static int64_t Aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }
  int64_t Row(int part) const { return all_.weights[part].outputs * y_width_; }
  char* Result(int part, int64_t row) const { return static_cast<char*>(all_.weights[part].y) + row * Row(part); }

  template <typename Linear>
  void RunOne(int64_t expert, const Stride* strides, char* scratch, const Linear& linear) const {
    const int64_t count = routed_.Count(expert), *rows = routed_.Rows(expert);
    const bool adjacent = routed_.Adjacent(expert);
    const char* x = static_cast<const char*>(all_.x);
    char* gathered = scratch + own_;
    LinearArguments own = all_;
    own.rows = count;
    own.scratch = scratch;
    own.x = adjacent ? x + rows[0] * x_row_ : gathered;
    for (int64_t i = 0; i < count && !adjacent; ++i) std::memcpy(gathered + i * x_row_, x + rows[i] * x_row_, x_row_);
    char* y = gathered + x_;
    for (int part = 0; part < all_.parts; ++part) {
      const Stride& bytes = strides[part];
      Weight& weight = own.weights[part];
      const auto step = [&](const void*& array, int64_t size) {
        if (array) array = static_cast<const char*>(array) + expert * size;
      };
      step(weight.data, bytes.data);
      step(weight.scale, bytes.scale);
      step(weight.minimum, bytes.minimum);
      step(weight.scale_unit, bytes.scale_unit);
      step(weight.minimum_unit, bytes.minimum_unit);
      step(weight.bias, bytes.bias);
      if (part < results_) {
        weight.y = adjacent ? Result(part, rows[0]) : y;
        y += y_[part];
      }
    }
    linear(own);
    for (int part = 0; part < results_ && !adjacent; ++part) {
      const char* from = static_cast<const char*>(own.weights[part].y);
      for (int64_t i = 0; i < count; ++i) std::memcpy(Result(part, rows[i]), from + i * Row(part), Row(part));
    }
  }

  const LinearArguments& all_;
  const Routed& routed_;
  const int results_;
  const int64_t y_width_;
  int64_t x_row_, own_, x_, y_[kMostParts];  // bytes: of a row of x, and of parts of the scratch
};

}  // namespace neuronx
