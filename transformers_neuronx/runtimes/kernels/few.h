// Attention of a few queries.
#pragma once

#include "heads.h"

namespace neuronx::NEURONX_LEVEL {
namespace {

constexpr int64_t kPositions = 64;  // of a block

// COUNT queries, with positions along the lanes. WHOLE says that features fill groups of kParts vectors.
template <typename Head, int COUNT, bool WHOLE>
struct Few {
  using Number = typename Head::Number;
  struct Scores { Floats of[kPositions / kLanes]; };

  const Head& head;
  const int64_t first, parts;  // first query; vectors of features
  int64_t oldest = INT32_MAX, newest = -1;
  int64_t own[COUNT], from[COUNT];  // positions: each query sees from .. own
  Wide q[COUNT], context[COUNT];
  float largest[COUNT], sum[COUNT];

  Few(const Head& head, int64_t first)
      : head(head), first(first), parts(RoundUp(head.a.size, kLanes * kParts) / kLanes) {
    for (int i = 0; i < COUNT; ++i) {
      own[i] = head.Own(first + i);
      from[i] = head.Oldest(own[i]);
      largest[i] = head.Sink(first + i);
      sum[i] = SumOfSink(largest[i]);
      oldest = Least(oldest, from[i]);
      newest = own[i] > newest ? own[i] : newest;
      memset(q[i], 0, parts * sizeof q[i][0]), memset(context[i], 0, parts * sizeof context[i][0]);
      Widen(head.a.q, head.a.type, head.At(first + i), head.a.size, reinterpret_cast<float*>(q[i]));
      for (int64_t part = 0; part < parts; ++part) q[i][part] *= head.a.scale;
    }
  }

  void Run() {
    for (int64_t position = oldest / kPositions * kPositions; position <= newest; position += kPositions)
      Add(position, Least(newest + 1 - position, kPositions));
    for (int i = 0; i < COUNT; ++i) head.Finish(first + i, reinterpret_cast<const float*>(context[i]), sum[i]);
  }

  Floats Part(const Number* numbers, int64_t part) const {
    if constexpr (WHOLE) return Widened(numbers + part * kLanes);
    return head.Part(numbers, part);
  }

  void Add(int64_t position, int64_t count) {
    Scores scores[COUNT];
    for (int64_t at = 0; at < count; at += kLanes) Score(position + at, Least(count - at, kLanes), at / kLanes, scores);
    for (int i = 0; i < COUNT; ++i) Weigh(i, position, count, scores[i]);
    for (int64_t part = 0; part < parts; part += kParts) AddValues(part, position, count, scores);
  }

  void Score(int64_t position, int64_t count, int64_t at, Scores (&scores)[COUNT]) const {
    Floats products[COUNT][kLanes] = {};
    const Number *key = head.Key(position), *value = head.Value(position);
    for (int64_t i = 0; i < count; ++i, key += head.Stride(), value += head.Stride()) {
      head.Ask(value);
      for (int64_t part = 0; part < parts; part += kParts)
        UNROLL for (int64_t j = 0; j < kParts; ++j) {
          const Floats some = Part(key, part + j);
          UNROLL for (int query = 0; query < COUNT; ++query) products[query][i] += q[query][part + j] * some;
        }
    }
    const Ints offset = Count();
    for (int query = 0; query < COUNT; ++query) {
      Floats all = Totals(products[query]);
      if constexpr (Head::kScaled) all *= Some(head.KeyScales(position), count);
      const Ints distance = static_cast<int32_t>(own[query] - position) - offset;
      all = head.Score(all, first + query, position, count, distance);
      const Ints seen = (distance >= 0) & (distance <= static_cast<int32_t>(own[query] - from[query]));
      scores[query].of[at] = seen & (offset < static_cast<int32_t>(count)) ? all : Floats{} + kNone;
    }
  }

  // Turns scores into weights, and scales down earlier sums if a score is larger than all before.
  void Weigh(int query, int64_t position, int64_t count, Scores& scores) {
    Floats most = Floats{} + largest[query], total = {};
    for (int64_t i = 0; i * kLanes < count; ++i) most = Larger(most, scores.of[i]);
    const float before = largest[query];
    for (int lane = 0; lane < kLanes; ++lane)
      if (most[lane] > largest[query]) largest[query] = most[lane];
    const float zero = largest[query] == kNone ? 0 : largest[query];  // for a query that has seen nothing yet
    const Floats factor = Exp(Floats{} + (before - zero));
    for (int64_t i = 0; i * kLanes < count; ++i) {
      scores.of[i] = Exp(scores.of[i] - zero);
      total += scores.of[i];
      if constexpr (Head::kScaled) scores.of[i] *= Some(head.ValueScales(position + i * kLanes), count - i * kLanes);
    }
    sum[query] = sum[query] * factor[0] + Total(total);
    for (int64_t part = 0; part < parts; ++part) context[query][part] *= factor;
  }

  void AddValues(int64_t part, int64_t position, int64_t count, const Scores (&scores)[COUNT]) {
    Floats sums[COUNT][kParts] = {};
    const bool last = position + kPositions > newest;
    for (int64_t at = 0, end; at < count; at = end) {
      end = Least(at + head.Adjacent(), count);
      const int64_t later = Least(position + kPositions + at, newest);
      const Number* value = head.Value(position + at);
      const Number* next = last ? head.NextKeys() + at * head.Stride() : head.Key(later);
      for (int64_t i = at; i < end; ++i, value += head.Stride(), next += head.Stride()) {
        head.Ask(next);
        UNROLL for (int64_t j = 0; j < kParts; ++j) {
          const Floats some = Part(value, part + j);
          UNROLL for (int query = 0; query < COUNT; ++query)
            sums[query][j] += reinterpret_cast<const float*>(scores[query].of)[i] * some;
        }
      }
    }
    UNROLL for (int query = 0; query < COUNT; ++query)
      UNROLL for (int64_t j = 0; j < kParts; ++j) context[query][part + j] += sums[query][j];
  }
};

}  // namespace
}  // namespace neuronx::NEURONX_LEVEL
