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

 private:
  std::vector<int64_t> first_, rows_;
};

// Linear layers for the rows of each expert. Rows that are not adjacent are copied to be, and back. Experts with few rows
// are computed together.
class Gathered {
 public:
  template <typename Scratch>
  Gathered(const LinearArguments& all, const Stride* strides, const Routed& routed, int64_t x_width, int64_t y_width,
           const Scratch& scratch)
      : all_(all), strides_(strides), routed_(routed), x_row_(all.inputs * x_width), y_width_(y_width),
        results_(all.activation == Activation::kNone ? all.parts : 1) {
    int64_t rows = kTogether, bytes = 0;
    for (int64_t expert = 0; expert < routed.Experts(); ++expert) {
      const int64_t count = routed.Count(expert);
      if (count == 0) continue;
      if (rows + count > kTogether) batches_.emplace_back(), rows = bytes = 0;
      LinearArguments own = all;
      own.rows = count;
      const Room room = {expert, bytes, bytes + Aligned(scratch(own))};
      bytes = room.gathered;
      if (!routed.Adjacent(expert)) {
        bytes += Aligned(count * x_row_);
        for (int part = 0; part < results_; ++part) bytes += Aligned(count * Row(part));
      }
      batches_.back().push_back(room);
      rows += count;
      bytes_ = std::max(bytes_, bytes);
    }
  }

  int64_t Bytes() const { return bytes_; }

  // Calls linear(products) for experts that are computed together.
  template <typename Linear>
  void Run(void* scratch, const Linear& linear) const {
    for (const auto& batch : batches_) {
      std::vector<LinearArguments> products;
      for (const Room& room : batch) products.push_back(Gather(room, static_cast<char*>(scratch)));
      linear(products);
      for (size_t i = 0; i < batch.size(); ++i) PutBack(batch[i].expert, products[i]);
    }
    const int64_t none = routed_.Experts();
    for (int part = 0; part < results_; ++part)
      for (int64_t i = 0; i < routed_.Count(none); ++i) std::memset(Result(part, routed_.Rows(none)[i]), 0, Row(part));
  }

 private:
  static constexpr int64_t kTogether = 64;  // rows, of several experts
  struct Room { int64_t expert, own, gathered; };  // offsets: of the product's scratch, and of copies after it

  static int64_t Aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }
  int64_t Row(int part) const { return all_.weights[part].outputs * y_width_; }
  char* Result(int part, int64_t row) const { return static_cast<char*>(all_.weights[part].y) + row * Row(part); }

  // The product of an expert, after its rows were gathered.
  LinearArguments Gather(const Room& room, char* scratch) const {
    const int64_t expert = room.expert, count = routed_.Count(expert), *rows = routed_.Rows(expert);
    const bool adjacent = routed_.Adjacent(expert);
    const char* x = static_cast<const char*>(all_.x);
    char* gathered = scratch + room.gathered;
    LinearArguments own = all_;
    own.rows = count;
    own.scratch = scratch + room.own;
    own.x = adjacent ? x + rows[0] * x_row_ : gathered;
    for (int64_t i = 0; i < count && !adjacent; ++i) std::memcpy(gathered + i * x_row_, x + rows[i] * x_row_, x_row_);
    char* y = gathered + Aligned(count * x_row_);
    for (int part = 0; part < all_.parts; ++part) {
      const Stride& bytes = strides_[part];
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
        y += Aligned(count * Row(part));
      }
    }
    return own;
  }

  // Copies results to the rows that they are of.
  void PutBack(int64_t expert, const LinearArguments& product) const {
    const int64_t *rows = routed_.Rows(expert);
    for (int part = 0; part < results_ && !routed_.Adjacent(expert); ++part) {
      const char* from = static_cast<const char*>(product.weights[part].y);
      for (int64_t i = 0; i < product.rows; ++i) std::memcpy(Result(part, rows[i]), from + i * Row(part), Row(part));
    }
  }

  const LinearArguments& all_;
  const Stride* strides_;
  const Routed& routed_;
  const int64_t x_row_, y_width_;  // bytes
  const int results_;
  int64_t bytes_ = 0;
  std::vector<std::vector<Room>> batches_;
};

}  // namespace neuronx
