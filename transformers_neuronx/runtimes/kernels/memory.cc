// Attention to a memory, as in `layers/memory.py`. Every token of a row sees the same positions: all of its memory.
#include <algorithm>

#include "attention.h"

namespace neuronx::NEURONX_LEVEL {
namespace {

constexpr int64_t kAhead = 8;  // positions by which keys are prefetched ahead

// `count` floats with the stride `apart`. With a stride of 0, all are the first.
inline Floats Spread(const float* from, int64_t apart, int64_t count) {
  if (apart == 0) return Floats{} + *from;
  if (apart == 1) return Some(from, count);
  return Gather(from, Count() < static_cast<int32_t>(count) ? Count() * static_cast<int32_t>(apart) : Ints{});
}

// In a memory, the heads of a position are adjacent.
template <typename Number>
struct Remembered : HeadOf<Number, MemoryArguments> {
  using Base = HeadOf<Number, MemoryArguments>;
  using Base::a, Base::group, Base::HeadOfQuery;
  static constexpr bool kScaled = false, kWrites = false;

  int64_t length;  // positions that are seen
  const Number *keys, *values;
  const float* bias;  // of the row and the head, or null

  // The offsets of the queries' biases, and the number of queries.
  struct Lanes {
    Ints biases = {};
    int64_t count;

    Lanes(const Remembered& head, int64_t query, int64_t some) : count(some > 0 ? Least(some, kLanes) : 0) {
      for (int64_t i = 0; i < count; ++i) biases[i] = static_cast<int32_t>(head.Bias(query + i));
    }
  };

  Remembered(const MemoryArguments& a, int64_t row, int64_t head) : Base(a, row, head, row * a.tokens, a.tokens) {
    const int64_t memory = a.slots ? std::clamp<int64_t>(a.slots[row], 0, a.memories - 1) : row;
    const int64_t at = (memory * a.positions * a.kv_heads + head) * a.size;
    length = Least(a.length[memory], a.positions);
    keys = static_cast<const Number*>(a.keys) + at;
    values = static_cast<const Number*>(a.values) + at;
    bias = a.bias ? a.bias + row * a.bias_row + head * group * a.bias_head : nullptr;
  }

  static int64_t Tokens(const MemoryArguments& a, int64_t) { return a.tokens; }
  static bool Together(const MemoryArguments&, int64_t, bool many) { return many; }

  int64_t Stride() const { return a.kv_heads * a.size; }
  int64_t Adjacent() const { return a.positions; }
  const Number* Key(int64_t position) const { return keys + position * Stride(); }
  const Number* Value(int64_t position) const { return values + position * Stride(); }

  int64_t Own(int64_t) const { return length > 0 ? length - 1 : -1; }
  int64_t Oldest(int64_t) const { return 0; }
  int64_t Bias(int64_t query) const { return query % group * a.bias_head + query / group * a.bias_token; }

  Floats Score(Floats products, int64_t query, int64_t position, int64_t count, Ints) const {
    return bias ? products + Biases(query, position, count) : products;
  }

  // Positions are so far apart in memory that processors do not prefetch the next one by themselves.
  using Base::Ask;
  __attribute__((always_inline)) void Ask(const Lanes (&lanes)[2], int64_t position, bool first) const {
    if (first) {
      Ask(Value(position));
      Ask(Key(position + kAhead));
    }
    if (bias)
      for (const Lanes& each : lanes) __builtin_prefetch(bias + each.biases[0] + position * a.bias_position);
  }

  void Score(int half, const Lanes& lanes, Ints, int64_t position, int64_t count, Floats (*scores)[2]) const {
    if (!bias) return;
    const float* from = bias + position * a.bias_position;
    const auto add = [&](const auto& biases) {
      for (int64_t i = 0; i < count; ++i, from += a.bias_position) scores[i][half] += biases();
    };
    if (group > 1) return add([&] { return Gather(from, lanes.biases); });
    from += lanes.biases[0];
    if (a.bias_token == 1 && lanes.count == kLanes) return add([&] { return Load<Floats>(from); });
    add([&] { return Spread(from, a.bias_token, lanes.count); });
  }

  // Not inlined, like what the cache's heads add.
  __attribute__((noinline)) Floats Biases(int64_t query, int64_t position, int64_t count) const {
    return Spread(bias + Bias(query) + position * a.bias_position, a.bias_position, count);
  }
};

}  // namespace

void AttendTo(const MemoryArguments& arguments, const Pool& pool) {
  switch (arguments.type) {
    case Type::kF32: return Attention<Remembered<float>>(arguments).Run(pool);
    case Type::kBF16: return Attention<Remembered<BFloat16>>(arguments).Run(pool);
    case Type::kF16: return Attention<Remembered<Float16>>(arguments).Run(pool);
    default: return;
  }
}

}  // namespace neuronx::NEURONX_LEVEL
