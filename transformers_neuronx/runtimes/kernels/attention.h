// Attention of all heads to keys and values, wherever those are stored.
#pragma once

#include "few.h"
#include "many.h"

namespace neuronx::NEURONX_LEVEL {
namespace {

constexpr int64_t kFew = kLanes / 2;  // queries, too few to pay for a lane each

// All heads of all rows, with the queries of each in blocks.
template <typename Head>
struct Attention {
  const typename Head::Arguments& a;
  int64_t heads, blocks;  // heads of all rows; blocks of a head's queries

  explicit Attention(const typename Head::Arguments& a) : a(a), heads(a.rows * a.kv_heads) {
    const int64_t queries = a.tokens * (a.heads / a.kv_heads);
    blocks = queries <= kFew ? 1 : RoundUp(queries, kQueries) / kQueries;
  }

  Head HeadAt(int64_t head) const { return Head(a, head / a.kv_heads, head % a.kv_heads); }

  void Attend(const Head& head, int64_t block) const {
    if (head.Queries() > kFew) return Many<Head>(head, block * kQueries).Run();
    const bool whole = a.size % (kLanes * kParts) == 0;
    whole ? AttendFew<4, true>(head, 0) : AttendFew<4, false>(head, 0);
  }

  template <int COUNT, bool WHOLE>
  void AttendFew(const Head& head, int64_t query) const {
    for (; query + COUNT <= head.Queries(); query += COUNT) Few<Head, COUNT, WHOLE>(head, query).Run();
    if constexpr (COUNT > 1) AttendFew<COUNT / 2, WHOLE>(head, query);
  }

  void Run(const Pool& pool) const {
    if constexpr (Head::kWrites)
      if (blocks > 1) ForEach(pool, heads, [this](int64_t head) { HeadAt(head).Write(); });
    ForEach(pool, heads * blocks, [this](int64_t piece) {
      const auto head = HeadAt(piece / blocks);
      if constexpr (Head::kWrites)
        if (blocks == 1) head.Write();
      Attend(head, piece % blocks);
    });
  }
};

}  // namespace
}  // namespace neuronx::NEURONX_LEVEL
