// Many queries of a head, along the lanes of two vectors. Keys and values in bf16 are multiplied directly where that
// pays. Weights are then bf16 as well, with two positions in a word.
#pragma once

#include <type_traits>

#include "amx.h"
#include "heads.h"
#include "kinds.h"

namespace neuronx::NEURONX_LEVEL {
namespace {

constexpr int64_t kQueries = 2 * kLanes;

// How queries are multiplied with keys and values of a type of numbers:
//   Kind, kPositions                 what is multiplied; positions of a block
//   Registers                        an object that exists while registers are needed
//   Score(many, position, count)     computes the scores of a block, with SetScores
//   AddValues(many, count)           adds `count` words of weighted values to contexts
template <typename Number>
struct Products;

template <typename Head>
struct Many {
  using Number = typename Head::Number;
  using Multiplied = Products<Number>;
  using Kind = typename Multiplied::Kind;
  static constexpr int64_t kPositions = Multiplied::kPositions, kWords = kPositions / Kind::PER_PART;

  const Head& head;
  const int64_t first, count, words, parts;  // query; queries; words of a key; vectors of a value
  int64_t oldest = INT32_MAX, newest = -1;   // positions that any of them sees
  int64_t seen_first = 0, seen_last = INT32_MAX;  // and that all of them see
  Ints own[2], from[2];                      // positions: each sees from .. own
  Floats largest[2], sum[2], factor[2];  // of scores; of weights; for the sums before
  const typename Head::Lanes lanes[2];
  Ints q[kSize][2];                          // words, padded with zeros
  Floats weights[kPositions][2];             // scores first, then words of weights
  Floats values[kWords * kSize / kLanes], context[kQueries * kSize / kLanes];  // [., parts]

  Many(const Head& head, int64_t first)
      : head(head), first(first), count(Least(head.Queries() - first, kQueries)),
        words(RoundUp(head.a.size, Kind::PER_PART) / Kind::PER_PART),
        parts(RoundUp(head.a.size, kParts * kLanes) / kLanes),
        lanes{{head, first, count}, {head, first + kLanes, count - kLanes}} {
    memset(context, 0, kQueries * parts * sizeof context[0]);
    for (int64_t i = 0; i < kQueries; ++i) {
      const int64_t mine = i < count ? head.Own(first + i) : -1;
      own[i / kLanes][i % kLanes] = static_cast<int32_t>(mine);
      from[i / kLanes][i % kLanes] = static_cast<int32_t>(head.Oldest(mine));
      const float sink = i < count ? head.Sink(first + i) : kNone;
      largest[i / kLanes][i % kLanes] = sink;
      sum[i / kLanes][i % kLanes] = SumOfSink(sink);
      seen_first = head.Oldest(mine) > seen_first ? head.Oldest(mine) : seen_first;
      seen_last = Least(seen_last, mine);
      if (mine < 0) continue;
      oldest = Least(oldest, head.Oldest(mine));
      newest = mine > newest ? mine : newest;
    }
    for (int64_t word = 0; word < RoundUp(words, kLanes); word += kLanes)
      for (int half = 0; half < 2; ++half) {
        Ints rows[kLanes] = {};
        for (int64_t i = 0; i < Least(count - half * kLanes, kLanes); ++i)
          rows[i] = QueryWords(head.At(first + half * kLanes + i), word * Kind::PER_PART, typename Kind::Active());
        Transpose(rows);
        for (int64_t i = 0; i < kLanes; ++i) q[word + i][half] = rows[i];
      }
  }

  // kLanes words of a query, from a feature on.
  Ints QueryWords(int64_t at, int64_t feature, float) const {
    return Cast<Ints>(Some(head.a.q, head.a.type, at + feature, head.a.size - feature));
  }
  Ints QueryWords(int64_t at, int64_t feature, BFloat16) const {
    Ints all = {};
    memcpy(&all, static_cast<const BFloat16*>(head.a.q) + at + feature, Least(head.a.size - feature, 2 * kLanes) * 2);
    return all;
  }

  void Run() {
    const typename Multiplied::Registers registers;
    for (int64_t position = oldest / kPositions * kPositions; position <= newest; position += kPositions)
      Add(position, Least(newest + 1 - position, kPositions));
    for (int64_t i = 0; i < count; ++i)
      head.Finish(first + i, reinterpret_cast<const float*>(context + i * parts), sum[i / kLanes][i % kLanes]);
  }

  void Add(int64_t position, int64_t positions) {
    Multiplied::Score(*this, position, positions);
    Weigh(position, positions);
    const int64_t joined = RoundUp(positions, Kind::PER_PART) / Kind::PER_PART;
    for (int64_t i = 0; i < joined; ++i) {
      const int64_t at = i * Kind::PER_PART;
      const bool both = at + 1 < positions;
      if constexpr (Kind::PER_PART > 1)
        for (int half = 0; half < 2; ++half)
          weights[i][half] = Kind::Joined(weights[at][half], both ? weights[at + 1][half] : Floats{});
      JoinValues(head.Value(position + at), both, values + i * parts);
    }
    Multiplied::AddValues(*this, joined);
  }

  // Prefetches some positions. The first queries of a head bring its keys and values into the processor's cache.
  void Ask(int64_t position, int64_t positions) const {
    for (int64_t i = 0; i < positions; ++i) head.Ask(lanes, position + i, first == 0);
  }

  // Turns the products of some positions into scores, where queries see the positions.
  void SetScores(int64_t position, int64_t count, Floats (*scores)[2]) const {
    for (int64_t i = 0; i < count; ++i) {
      float scale = head.a.scale;
      if constexpr (Head::kScaled) scale *= *head.KeyScales(position + i);
      UNROLL for (int half = 0; half < 2; ++half) scores[i][half] *= scale;
    }
    for (int half = 0; half < 2; ++half) head.Score(half, lanes[half], own[half], position, count, scores);
    if (seen_first <= position && position + count - 1 <= seen_last) return;
    for (int64_t i = 0; i < count; ++i) {
      const auto here = static_cast<int32_t>(position + i);
      for (int half = 0; half < 2; ++half)
        scores[i][half] = ((own[half] >= here) & (from[half] <= here)) ? scores[i][half] : Floats{} + kNone;
    }
  }

  // Turns scores into weights, and scales down earlier sums if a score is larger than all before.
  void Weigh(int64_t position, int64_t positions) {
    Floats most[2] = {largest[0], largest[1]}, total[2] = {}, zero[2];
    for (int64_t i = 0; i < positions; ++i)
      UNROLL for (int half = 0; half < 2; ++half) most[half] = Larger(most[half], weights[i][half]);
    for (int half = 0; half < 2; ++half) {
      zero[half] = most[half] == kNone ? Floats{} : most[half];  // for queries that have seen nothing yet
      factor[half] = Exp(largest[half] - zero[half]);
      largest[half] = most[half];
    }
    for (int64_t i = 0; i < positions; ++i)
      UNROLL for (int half = 0; half < 2; ++half) {
        const Floats weight = Exp(weights[i][half] - zero[half]);
        total[half] += weight;
        weights[i][half] = weight;
        if constexpr (Head::kScaled) weights[i][half] *= *head.ValueScales(position + i);
      }
    for (int half = 0; half < 2; ++half) sum[half] = sum[half] * factor[half] + total[half];
  }

  // Words of the values of one position, or two.
  void JoinValues(const Number* first, bool both, Floats* words) const {
    for (int64_t part = 0; part < parts; ++part) {
      words[part] = head.Part(first, part);
      if constexpr (Kind::PER_PART > 1)
        words[part] = Kind::JoinedExactly(words[part], both ? head.Part(first + head.Stride(), part) : Floats{});
    }
  }
};

// Products in vectors.
template <typename Number>
struct Products {
  struct Registers { Registers() {} };
  using Kind = std::conditional_t<std::is_same<Number, BFloat16>::value && kPairsPay, BF16, F32>;
  static constexpr int64_t kPositions = 64;
  static constexpr int kKeys = kRegisters == 32 ? 8 : 4, kTogether = 4;  // positions and queries at once
  static_assert(kPositions % kKeys == 0);  // room for the scores of all keys that are multiplied at once

  template <typename Many>
  static void Score(Many& many, int64_t position, int64_t positions) {
    for (int64_t i = 0; i < positions; i += kKeys)
      ScoreSome(many, position + i, Least(positions - i, kKeys), many.weights + i);
  }

  template <typename Many>
  static void ScoreSome(const Many& many, int64_t position, int64_t count, Floats (*scores)[2]) {
    int32_t room[kKeys * kSize];
    many.Ask(position, count);
    MultiplyKeys(many.q, many.words, Keys(many, position, count, room), scores);
    many.SetScores(position, count, scores);
  }

  struct Lines {
    const int32_t* first;
    int64_t words;  // from one to the next
  };

  // Keys in the layout for multiplying, in place if they have it. If keys are missing, the last one is repeated.
  template <typename Many>
  static Lines Keys(const Many& many, int64_t position, int64_t count, int32_t* room) {
    const int64_t size = many.head.a.size;
    if constexpr (sizeof(Number) == sizeof(typename Kind::Active))
      if (count == kKeys && size % Kind::PER_PART == 0)
        return {reinterpret_cast<const int32_t*>(many.head.Key(position)), many.head.Stride() / Kind::PER_PART};
    for (int64_t i = 0; i < kKeys; ++i) {
      const Number* key = many.head.Key(position + Least(i, count - 1));
      int32_t* words = room + i * many.words;
      if constexpr (Kind::PER_PART == 1) Widen(key, size, reinterpret_cast<float*>(words));
      else words[many.words - 1] = 0, memcpy(words, key, size * sizeof *key);
    }
    return {room, many.words};
  }

  // The following products are not inlined, so that sums have all registers.

  // Multiplies all queries with kKeys keys.
  __attribute__((noinline)) static void MultiplyKeys(const Ints (*q)[2], int64_t words, Lines keys,
                                                     Floats (*scores)[2]) {
    Floats sums[kKeys][2];
    UNROLL for (auto& each : sums) each[0] = each[1] = Floats{};
    for (int64_t j = 0; j < words; ++j) {
      const auto low = Kind::Read(reinterpret_cast<const char*>(q[j]));
      const auto high = Kind::Read(reinterpret_cast<const char*>(q[j] + 1));
      UNROLL for (int i = 0; i < kKeys; ++i) {
        auto same = Kind::Repeat(keys.first + i * keys.words + j);
        Keep(same);
        sums[i][0] = Kind::Add(sums[i][0], low, same);
        sums[i][1] = Kind::Add(sums[i][1], high, same);
      }
    }
    memcpy(scores, sums, sizeof sums);
  }

  template <typename Many>
  static void AddValues(Many& many, int64_t joined) {
    for (int64_t i = 0; i < many.count; i += kTogether)
      for (int64_t part = 0; part < many.parts; part += kParts) AddSome(many, i, part, joined);
  }

  // Adds to the contexts of kTogether queries.
  template <typename Many>
  static void AddSome(Many& many, int64_t query, int64_t part, int64_t joined) {
    MultiplyValues(reinterpret_cast<const int32_t*>(many.weights) + query, many.values + part, joined, many.parts,
                   reinterpret_cast<const float*>(many.factor) + query, many.context + query * many.parts + part);
  }

  __attribute__((noinline)) static void MultiplyValues(const int32_t* weight, const Floats* value, int64_t joined,
                                                       int64_t parts, const float* factor, Floats* to) {
    Floats sums[kTogether][kParts];
    UNROLL for (int i = 0; i < kTogether; ++i)
      UNROLL for (int j = 0; j < kParts; ++j) sums[i][j] = to[i * parts + j] * factor[i];
    for (int64_t i = 0; i < joined; ++i, value += parts, weight += kQueries) {
      typename Kind::Words words[kParts];
      UNROLL for (int j = 0; j < kParts; ++j) {
        words[j] = Kind::Read(reinterpret_cast<const char*>(value + j));
        Keep(words[j]);
      }
      UNROLL for (int k = 0; k < kTogether; ++k) {
        auto same = Kind::Repeat(weight + k);
        Keep(same);
        UNROLL for (int j = 0; j < kParts; ++j) sums[k][j] = Kind::Add(sums[k][j], words[j], same);
      }
    }
    UNROLL for (int i = 0; i < kTogether; ++i)
      UNROLL for (int j = 0; j < kParts; ++j) to[i * parts + j] = sums[i][j];
  }
};

#if defined(__AMX_BF16__)
// Products in tiles.
template <>
struct Products<BFloat16> {
  struct Registers : Tiles { Registers() : Tiles(kTile) {} };
  using Kind = BF16;
  static constexpr int64_t kPositions = 128;

  template <typename Many>
  static void Score(Many& many, int64_t position, int64_t positions) {
    for (int64_t i = 0; i < positions; i += 2 * kTile)
      positions - i > kTile ? Multiply<2>(many, position + i, positions - i, many.weights + i)
                            : Multiply<1>(many, position + i, positions - i, many.weights + i);
    many.SetScores(position, positions, many.weights);
  }

  // Multiplies queries with the keys of one or two tiles.
  template <int TILES, typename Many>
  static void Multiply(const Many& many, int64_t position, int64_t count, Floats (*scores)[2]) {
    alignas(64) BFloat16 room[TILES][kTile * kSize];
    Lines keys[TILES];
    for (int i = 0; i < TILES; ++i)
      keys[i] = Keys(many, position + i * kTile, Least(count - i * kTile, kTile), room[i]);
    ClearTile<0>(), ClearTile<1>(), ClearTile<2>(), ClearTile<3>();
    for (int64_t j = 0; j < many.words; j += kTile) {
      LoadTile<4>(keys[0].first + 2 * j, keys[0].bytes);
      LoadTile<6>(many.q[j], sizeof many.q[j]);
      AddTileProduct<0, 4, 6>();
      LoadTile<7>(many.q[j] + 1, sizeof many.q[j]);
      AddTileProduct<1, 4, 7>();
      if constexpr (TILES > 1) {
        LoadTile<5>(keys[1].first + 2 * j, keys[1].bytes);
        AddTileProduct<2, 5, 6>();
        AddTileProduct<3, 5, 7>();
      }
    }
    StoreTile<0>(scores[0], sizeof scores[0]), StoreTile<1>(scores[0] + 1, sizeof scores[0]);
    if constexpr (TILES > 1)
      StoreTile<2>(scores[kTile], sizeof scores[0]), StoreTile<3>(scores[kTile] + 1, sizeof scores[0]);
  }

  struct Lines {
    const BFloat16* first;
    int64_t bytes;  // from one to the next
  };

  // The keys of a tile, in place if they fill it.
  template <typename Many>
  static Lines Keys(const Many& many, int64_t position, int64_t count, BFloat16* room) {
    const int64_t size = many.head.a.size, whole = RoundUp(size, kTileInputs);
    many.Ask(position, count);
    const BFloat16* key = many.head.Key(position);
    if (count == kTile && size == whole) return {key, 2 * many.head.Stride()};
    memset(room, 0, kTile * whole * sizeof *room);
    for (int64_t i = 0; i < count; ++i, key += many.head.Stride()) memcpy(room + i * whole, key, size * sizeof *room);
    return {room, 2 * whole};
  }

  template <typename Many>
  static void AddValues(Many& many, int64_t joined) {
    const int64_t parts = many.parts, tiles = RoundUp(joined, kTile) / kTile;
    for (int64_t i = 0; i < many.count; ++i)
      for (int64_t part = 0; part < parts; ++part)
        many.context[i * parts + part] *= reinterpret_cast<const float*>(many.factor)[i];
    Ints weights[Many::kWords / kTile][kQueries];  // each row has the words of a query
    memset(many.weights + joined, 0, (tiles * kTile - joined) * sizeof many.weights[0]);
    memset(many.values + joined * parts, 0, (tiles * kTile - joined) * parts * sizeof many.values[0]);
    for (int64_t i = 0; i < tiles; ++i)
      for (int half = 0; half < 2; ++half) {
        auto& rows = reinterpret_cast<Ints(&)[kLanes]>(weights[i][half * kLanes]);
        for (int64_t j = 0; j < kTile; ++j) rows[j] = Cast<Ints>(many.weights[i * kTile + j][half]);
        Transpose(rows);
      }
    const int64_t line = parts * sizeof(Floats);
    for (int64_t part = 0; part < parts; part += 2) {
      Floats *first = many.context + part, *last = first + kLanes * parts;
      LoadTile<0>(first, line), LoadTile<1>(first + 1, line), LoadTile<2>(last, line), LoadTile<3>(last + 1, line);
      for (int64_t i = 0; i < tiles; ++i) {
        const Floats* values = many.values + i * kTile * parts + part;
        LoadTile<4>(weights[i], kLineBytes), LoadTile<5>(weights[i] + kLanes, kLineBytes);
        LoadTile<6>(values, line), LoadTile<7>(values + 1, line);
        AddTileProduct<0, 4, 6>(), AddTileProduct<1, 4, 7>(), AddTileProduct<2, 5, 6>(), AddTileProduct<3, 5, 7>();
      }
      StoreTile<0>(first, line), StoreTile<1>(first + 1, line), StoreTile<2>(last, line), StoreTile<3>(last + 1, line);
    }
  }
};
#endif

}  // namespace
}  // namespace neuronx::NEURONX_LEVEL
