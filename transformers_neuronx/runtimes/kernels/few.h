// Attention of a few queries, with positions along the lanes.
#pragma once

#include <type_traits>

#include "amx.h"
#include "heads.h"

namespace neuronx::NEURONX_LEVEL {
namespace {

constexpr int64_t kPositions = 64;  // of a block

struct Scores { Floats of[kPositions / kLanes]; };

// Products of COUNT queries in vectors. WHOLE says that features fill groups of kParts vectors.
template <typename Head, int COUNT, bool WHOLE>
struct InVectors {
  using Number = typename Head::Number;

  const Head& head;
  const int64_t parts;  // vectors of features
  Wide q[COUNT], context[COUNT];

  InVectors(const Head& head, int64_t first)
      : head(head), parts(RoundUp(head.a.size, kLanes * kParts) / kLanes) {
    for (int i = 0; i < COUNT; ++i) {
      memset(q[i], 0, parts * sizeof q[i][0]), memset(context[i], 0, parts * sizeof context[i][0]);
      Widen(head.a.q, head.a.type, head.At(first + i), head.a.size, reinterpret_cast<float*>(q[i]));
    }
  }

  Floats Part(const Number* numbers, int64_t part) const {
    if constexpr (WHOLE) return Widened(numbers + part * kLanes);
    return head.Part(numbers, part);
  }

  // Multiplies the keys of a block, and prefetches its values.
  void MultiplyKeys(int64_t position, int64_t count, Scores (&scores)[COUNT]) const {
    for (int64_t at = 0; at < count; at += kLanes)
      MultiplySome(position + at, Least(count - at, kLanes), at / kLanes, scores);
  }

  void MultiplySome(int64_t position, int64_t count, int64_t at, Scores (&scores)[COUNT]) const {
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
    for (int query = 0; query < COUNT; ++query) scores[query].of[at] = Totals(products[query]);
  }

  // Adds the weighted values of a block, and prefetches the keys of the next one, if there is one.
  void AddValues(int64_t position, int64_t count, int64_t newest, const Scores (&weights)[COUNT]) {
    for (int64_t part = 0; part < parts; part += kParts) AddPart(part, position, count, newest, weights);
  }

  void AddPart(int64_t part, int64_t position, int64_t count, int64_t newest, const Scores (&weights)[COUNT]) {
    Floats sums[COUNT][kParts] = {};
    const int64_t after = newest + 1 - position - kPositions;  // positions of the next block, and more
    for (int64_t at = 0, end; at < count; at = end) {
      end = Least(at + head.Adjacent(), count);
      const Number* value = head.Value(position + at);
      const Number* next = at < after ? head.Key(position + kPositions + at) : value;
      for (int64_t i = at; i < end; ++i, value += head.Stride(), next += i + 1 < after ? head.Stride() : 0) {
        head.Ask(next);
        UNROLL for (int64_t j = 0; j < kParts; ++j) {
          const Floats some = Part(value, part + j);
          UNROLL for (int query = 0; query < COUNT; ++query)
            sums[query][j] += reinterpret_cast<const float*>(weights[query].of)[i] * some;
        }
      }
    }
    UNROLL for (int query = 0; query < COUNT; ++query)
      UNROLL for (int64_t j = 0; j < kParts; ++j) context[query][part + j] += sums[query][j];
  }

  const float* Context(int query) const { return reinterpret_cast<const float*>(context[query]); }
};

#if defined(__AMX_BF16__)
// Features that fill lines of tiles, or 0 if there are no tiles for the numbers of a head.
template <typename Head>
constexpr int64_t kTiled = std::is_same<typename Head::Number, BFloat16>::value ? kTileInputs : 0;

// Products of COUNT queries in tiles, of keys and values in bf16. Features fill lines of tiles. Weights are rounded to
// bf16.
template <typename Head, int COUNT>
struct InTiles {
  static constexpr int kQueryBytes = 4 * COUNT;  // a word of each query

  const Head& head;
  const int64_t parts;  // vectors of features
  // Two sums of scores, keys, queries, two sums of contexts, weights, values.
  const Tiles tiles{{{kTile, kQueryBytes}, {kTile, kQueryBytes}, {kTile, kLineBytes}, {kTile, kQueryBytes},
                     {COUNT, kLineBytes}, {COUNT, kLineBytes}, {COUNT, kLineBytes}, {kTile, kLineBytes}}};
  int32_t q[kSize / 2][COUNT];  // words of two features
  Wide context[COUNT];          // with features in the order of `Interleave`

  InTiles(const Head& head, int64_t first) : head(head), parts(head.a.size / kLanes) {
    for (int i = 0; i < COUNT; ++i) {
      memset(context[i], 0, parts * sizeof context[i][0]);
      const auto* from = static_cast<const BFloat16*>(head.a.q) + head.At(first + i);
      for (int64_t word = 0; word < head.a.size / 2; ++word) memcpy(&q[word][i], from + 2 * word, sizeof q[word][i]);
    }
  }

  void MultiplyKeys(int64_t position, int64_t count, Scores (&scores)[COUNT]) const {
    alignas(64) int32_t found[kPositions][COUNT];
    for (int64_t at = 0; at < count; at += 2 * kTile) {
      MultiplySome<0>(position + at, count - at, found[at]);
      if (at + kTile < count) MultiplySome<1>(position + at + kTile, count - at - kTile, found[at + kTile]);
    }
    for (int64_t at = 0; at < count; at += kTile) Divide(found[at], at / kLanes, scores);
  }

  // Multiplies the keys of one tile.
  template <int SUMS>
  void MultiplySome(int64_t position, int64_t count, int32_t* to) const {
    alignas(64) BFloat16 room[kTile * kSize];
    const BFloat16 *key = head.Key(position), *value = head.Value(position);
    int64_t stride = head.Stride();
    for (int64_t i = 0; i < Least(count, kTile); ++i) head.Ask(value + i * stride);
    if (count < kTile) {  // what comes after may be outside of the cache
      for (int64_t i = 0; i < count; ++i) memcpy(room + i * head.a.size, key + i * stride, head.a.size * sizeof *key);
      key = room, stride = head.a.size;
    }
    ClearTile<SUMS>();
    for (int64_t i = 0; i < head.a.size; i += kTileInputs) {
      LoadTile<2>(key + i, stride * sizeof *key), LoadTile<3>(q[i / 2], kQueryBytes);
      AddTileProduct<SUMS, 2, 3>();
    }
    StoreTile<SUMS>(to, kQueryBytes);
  }

  // Divides sums of positions into those of each query.
  static void Divide(const int32_t* found, int64_t at, Scores (&scores)[COUNT]) {
    const __m512i even = Cast<__m512i>(Count() * 2), odd = Cast<__m512i>(Count() * 2 + 1);
    __m512 all[COUNT], next[COUNT];
    UNROLL16 for (int i = 0; i < COUNT; ++i) all[i] = Load<__m512>(found + i * kLanes);
    UNROLL for (int step = 1; step < COUNT; step *= 2) {
      UNROLL16 for (int i = 0; i < COUNT / 2; ++i) {
        next[i] = _mm512_permutex2var_ps(all[2 * i], even, all[2 * i + 1]);
        next[i + COUNT / 2] = _mm512_permutex2var_ps(all[2 * i], odd, all[2 * i + 1]);
      }
      UNROLL16 for (int i = 0; i < COUNT; ++i) all[i] = next[i];
    }
    UNROLL16 for (int i = 0; i < COUNT; ++i) scores[i].of[at] = Cast<Floats>(all[i]);
  }

  void AddValues(int64_t position, int64_t count, int64_t newest, const Scores (&weights)[COUNT]) {
    alignas(64) BFloat16 rounded[2][COUNT][kTileInputs] = {};
    for (int64_t i = 0; i < count; i += kLanes)
      UNROLL16 for (int query = 0; query < COUNT; ++query)
        Put(weights[query].of[i / kLanes], rounded[i / kTileInputs][query] + i % kTileInputs);
    AskKeys(position + kPositions, Least(position + 2 * kPositions, newest + 1));
    for (int64_t part = 0; part < parts; part += 2) {
      Floats* to = &context[0][part];
      LoadTile<4>(to, sizeof context[0]), LoadTile<5>(to + 1, sizeof context[0]);
      for (int64_t at = 0; at < count; at += kTileInputs) {
        alignas(64) Ints words[2][kTile];
        for (int64_t half = 0; half < 2; ++half)
          Interleave(position + at + half * kTile, count - at - half * kTile, part * kLanes,
                     words[0] + half * kTile / 2, words[1] + half * kTile / 2);
        LoadTile<6>(rounded[at / kTileInputs], kLineBytes);
        LoadTile<7>(words[0], kLineBytes);
        AddTileProduct<4, 6, 7>();
        LoadTile<7>(words[1], kLineBytes);
        AddTileProduct<5, 6, 7>();
      }
      StoreTile<4>(to, sizeof context[0]), StoreTile<5>(to + 1, sizeof context[0]);
    }
  }

  // Prefetches the keys of some positions.
  void AskKeys(int64_t position, int64_t end) const {
    for (; position < end; position += kTile) {
      const BFloat16* key = head.Key(position);
      for (int64_t i = 0; i < Least(end - position, kTile); ++i) head.Ask(key + i * head.Stride());
    }
  }

  // Joins 32 features of pairs of up to kTile positions. Words of four features, and of the next four, and so on, are
  // in turns in the first and in the second.
  void Interleave(int64_t position, int64_t count, int64_t feature, Ints* first, Ints* second) const {
    const BFloat16* value = count > 0 ? head.Value(position) + feature : nullptr;
    const int64_t stride = head.Stride();
    for (int64_t i = 0; i < kTile / 2; ++i, value += 2 * stride) {
      const __m512i low = 2 * i < count ? Load<__m512i>(value) : __m512i{};
      const __m512i high = 2 * i + 1 < count ? Load<__m512i>(value + stride) : __m512i{};
      first[i] = Cast<Ints>(_mm512_unpacklo_epi16(low, high));
      second[i] = Cast<Ints>(_mm512_unpackhi_epi16(low, high));
    }
  }

  // Brings the features of a context into their own order.
  const float* Context(int query) {
    const Ints lane = Count(), low = lane / 8 * 4 + lane % 4 + lane / 4 % 2 * kLanes;
    const __m512i first = Cast<__m512i>(low), second = Cast<__m512i>(low + kLanes / 2);
    for (int64_t part = 0; part < parts; part += 2) {
      const auto a = Cast<__m512>(context[query][part]), b = Cast<__m512>(context[query][part + 1]);
      context[query][part] = Cast<Floats>(_mm512_permutex2var_ps(a, first, b));
      context[query][part + 1] = Cast<Floats>(_mm512_permutex2var_ps(a, second, b));
    }
    return reinterpret_cast<const float*>(context[query]);
  }
};
#else
template <typename Head>
constexpr int64_t kTiled = 0;
template <typename Head, int COUNT>
struct InTiles;
#endif

// COUNT queries. Products make scores of keys, and sums of values.
template <typename Head, int COUNT, typename Products>
struct Few {
  const Head& head;
  const int64_t first;  // query
  int64_t oldest = INT32_MAX, newest = -1;
  int64_t own[COUNT], from[COUNT];  // positions: each query sees from .. own
  float largest[COUNT], sum[COUNT];
  Products products;

  Few(const Head& head, int64_t first) : head(head), first(first), products(head, first) {
    for (int i = 0; i < COUNT; ++i) {
      own[i] = head.Own(first + i);
      from[i] = head.Oldest(own[i]);
      largest[i] = head.Sink(first + i);
      sum[i] = SumOfSink(largest[i]);
      oldest = Least(oldest, from[i]);
      newest = own[i] > newest ? own[i] : newest;
    }
  }

  void Run() {
    for (int64_t position = oldest / kPositions * kPositions; position <= newest; position += kPositions)
      Add(position, Least(newest + 1 - position, kPositions));
    for (int i = 0; i < COUNT; ++i) head.Finish(first + i, products.Context(i), sum[i]);
  }

  void Add(int64_t position, int64_t count) {
    Scores scores[COUNT];
    products.MultiplyKeys(position, count, scores);
    for (int64_t at = 0; at < count; at += kLanes)
      SetScores(position + at, Least(count - at, kLanes), at / kLanes, scores);
    for (int i = 0; i < COUNT; ++i) Weigh(i, position, count, scores[i]);
    products.AddValues(position, count, newest, scores);
  }

  // Turns products into scores.
  void SetScores(int64_t position, int64_t count, int64_t at, Scores (&scores)[COUNT]) const {
    const Ints offset = Count();
    for (int query = 0; query < COUNT; ++query) {
      Floats all = scores[query].of[at] * head.a.scale;
      if constexpr (Head::kScaled) all *= Some(head.KeyScales(position), count);
      const Ints distance = static_cast<int32_t>(own[query] - position) - offset;
      all = head.Score(all, first + query, position, count, distance);
      const Ints seen = (distance >= 0) & (distance <= static_cast<int32_t>(own[query] - from[query]));
      scores[query].of[at] = (seen & (offset < static_cast<int32_t>(count))) ? all : Floats{} + kNone;
    }
  }

  // Turns scores into weights, and scales down earlier sums if a score is larger than all before.
  void Weigh(int query, int64_t position, int64_t count, Scores& scores) {
    Floats most = Floats{} + largest[query], total = {};
    for (int64_t i = 0; i * kLanes < count; ++i) most = Larger(most, scores.of[i]);
    const float before = largest[query];
    largest[query] = Most(most);
    const float zero = largest[query] == kNone ? 0 : largest[query];  // for a query that has seen nothing yet
    const Floats factor = Exp(Floats{} + (before - zero));
    for (int64_t i = 0; i * kLanes < count; ++i) {
      scores.of[i] = Exp(scores.of[i] - zero);
      total += scores.of[i];
      if constexpr (Head::kScaled) scores.of[i] *= Some(head.ValueScales(position + i * kLanes), count - i * kLanes);
    }
    sum[query] = sum[query] * factor[0] + Total(total);
    if (factor[0] == 1) return;
    for (int64_t part = 0; part < products.parts; ++part) products.context[query][part] *= factor;
  }
};

}  // namespace
}  // namespace neuronx::NEURONX_LEVEL
