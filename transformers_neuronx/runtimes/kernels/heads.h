// Attention of queries to keys and values, wherever those are stored: shared by the cache's attention and the memory's.
//
// A query is one head of one token. Queries that share a key head are processed together. Softmax runs over blocks of
// positions, and earlier sums are scaled down when a larger score appears (Milakov and Gimelshein, arXiv:1805.02867). A
// few queries have positions along the lanes of a vector. Many queries have one lane each.
//
// A kernel has a `Head`, made from its arguments, a row and a key head. It knows where keys and values are stored,
// which positions a query sees, and how products become scores:
//   Key(position), Value(position)     the numbers of a position; those of the next one are Stride() further on
//   Adjacent()                         of how many positions that is so, from each multiple of them on: at least 16
//   Own(query), Oldest(own)            the last position that a query sees, or -1, and the first one
//   Sink(query)                        the score of one more position, which has no value, or kNone
//   Score(products, query, position, count, distance)  scores of one query, with `count` positions along the lanes
//   Score(half, lanes, own, position, count, scores)   scores of half of the queries, along the lanes, and positions
//   Lanes(head, query, count)          what that needs to know about `count` queries
//   Ask(lanes, position, first)        prefetches what that needs soon; `first` says whether it is the first time
//   kScaled, key_scales, value_scales  whether the numbers of a position are multiplied by a scale, and the scales
//   kWrites, Write()                   whether new keys and values are written first
//   Tokens(a, row)                     the tokens of a row
//   Together(a, row, many)             whether its queries have one lane each; `many` says whether that pays
// Blocks of positions begin at multiples of their size, so that a query's sums do not depend on the others.
#pragma once

#include "lanes.h"

namespace neuronx::NEURONX_LEVEL {
namespace {

constexpr int64_t kSize = kLongestHead;
constexpr int64_t kParts = kRegisters == 32 ? 4 : 2;  // vectors of features that are summed at once
constexpr float kNone = -__builtin_inff();

typedef Floats Wide[kSize / kLanes];  // the features of a head

// NaN does not count as larger. It shows in its weight.
inline Floats Larger(Floats a, Floats b) { return b > a ? b : a; }

// The sum of weights before the first block: that of a sink is one, since its score is the largest so far.
inline float SumOfSink(float sink) { return sink == kNone ? 0 : 1; }

// One head of keys and values of one row, and its queries.
template <typename Stored, typename Given>
struct HeadOf {
  using Number = Stored;
  using Arguments = Given;

  const Arguments& a;
  const int64_t row, head, group;   // group: queries of a token
  const int64_t first_token, tokens;  // of the row

  HeadOf(const Arguments& a, int64_t row, int64_t head, int64_t first_token, int64_t tokens)
      : a(a), row(row), head(head), group(a.heads / a.kv_heads), first_token(first_token), tokens(tokens) {}

  int64_t Queries() const { return tokens * group; }
  int64_t HeadOfQuery(int64_t query) const { return head * group + query % group; }

  int64_t At(int64_t query) const {  // offset of the query in q, and of its context
    return ((first_token + query / group) * a.heads + HeadOfQuery(query)) * a.size;
  }

  float Sink(int64_t) const { return kNone; }  // the score of a position without a value, if there is one

  // The numbers of a position, padded with zeros.
  Floats Part(const Number* numbers, int64_t part) const {
    const int64_t rest = a.size - part * kLanes;
    return rest > 0 ? Some(numbers + part * kLanes, rest) : Floats{};
  }

  // Prefetches the numbers of a position. Compilers drop calls of a function that only prefetches.
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
