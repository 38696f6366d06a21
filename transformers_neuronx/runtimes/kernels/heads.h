// Queries that look at keys and values, wherever those lie: what attention over the cache and to a memory share.
//
// A query is one head of one token. Those that share a head of keys are worked on together, softmax goes block by block
// of positions, and what came before becomes smaller when a larger score turns up (Milakov and Gimelshein,
// arXiv:1805.02867). A few queries have positions along the lanes of a vector; of many, each has a lane of its own.
//
// A kernel has a `Head`, made of its arguments, a row and a head of keys. It says where these lie, which positions a
// query sees, and what becomes of products as scores:
//   Key(position), Value(position)     the numbers of a position; those of the next one stand Stride() further
//   NextKeys()                         what is looked at after this head
//   Own(query), Oldest(own)            the last position that a query sees, or -1, and the first one
//   Score(products, query, position, count, distance)  of a query, so many positions along the lanes from one on
//   Score(half, lanes, own, position, count, scores)   of half of the queries, along the lanes, and so many positions
//   Lanes(head, query, count)          what the latter wants to know of so many queries
//   Ask(lanes, position, first)        what that will want soon, and whether it is wanted for the first time
//   kScaled, key_scales, value_scales  whether numbers of a position are multiplied by a scale, which is there then
//   kWrites, Write()                   whether keys and values are put there first
#pragma once

#include "vectors.h"

namespace neuronx::NEURONX_LEVEL {
namespace {

constexpr int64_t kSize = 256;      // features of a head, at most
constexpr int64_t kParts = kLanes == 16 ? 4 : 2;  // vectors of features that are summed at once
constexpr float kNone = -__builtin_inff();

typedef Floats Wide[kSize / kLanes];  // the features of a head

// What is not a number is not larger: its weight will say so.
inline Floats Larger(Floats a, Floats b) { return b > a ? b : a; }

// One head of keys and values of one row, and the queries that look at it.
template <typename Stored, typename Given>
struct HeadOf {
  using Number = Stored;
  using Arguments = Given;

  const Arguments& a;
  const int64_t row, head, group;  // group: queries of a token

  HeadOf(const Arguments& a, int64_t row, int64_t head) : a(a), row(row), head(head), group(a.heads / a.kv_heads) {}

  int64_t Queries() const { return a.tokens * group; }
  int64_t HeadOfQuery(int64_t query) const { return head * group + query % group; }

  int64_t At(int64_t query) const {  // where it stands among all queries, and its context among all
    return ((row * a.tokens + query / group) * a.heads + HeadOfQuery(query)) * a.size;
  }

  // The numbers of a position, and zeros behind them.
  Floats Part(const Number* numbers, int64_t part) const {
    const int64_t rest = a.size - part * kLanes;
    return rest > 0 ? Some(numbers + part * kLanes, rest) : Floats{};
  }

  // The numbers of a position will be wanted soon. Compilers leave out calls of a function that does no more than that.
  __attribute__((always_inline)) void Ask(const Number* numbers) const {
    const char* line = reinterpret_cast<const char*>(numbers);
    for (int64_t i = 0; i < a.size * static_cast<int64_t>(sizeof *numbers); i += 64) __builtin_prefetch(line + i, 0, 2);
  }

  void Finish(int64_t query, const float* context, float sum) const {
    float scaled[kSize];
    for (int64_t i = 0; i < a.size; ++i) scaled[i] = sum == 0 ? 0 : context[i] / sum;
    Narrow(scaled, a.type, a.size, a.context, At(query));
  }
};

}  // namespace
}  // namespace neuronx::NEURONX_LEVEL
