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

  template <int COUNT>
  using OfVectors = InVectors<Head, COUNT, true>;
  template <int COUNT>
  using OfParts = InVectors<Head, COUNT, false>;
  template <int COUNT>
  using OfTiles = InTiles<Head, COUNT>;

  explicit Attention(const typename Head::Arguments& a) : a(a) {}

  bool Together(int64_t row) const { return Head::Together(a, row, Queries(row) > kFew); }
  int64_t Queries(int64_t row) const { return Head::Tokens(a, row) * (a.heads / a.kv_heads); }
  int64_t Blocks(int64_t row) const { return Together(row) ? RoundUp(Queries(row), kQueries) / kQueries : 1; }

  void Attend(const Head& head, int64_t block) const {
    if (Together(head.row)) return Many<Head>(head, block * kQueries).Run();
    if constexpr (kTiled<Head> != 0)
      if (a.heads > a.kv_heads && a.size % kTiled<Head> == 0) return AttendFew<16, OfTiles>(head, 0);
    a.size % (kLanes * kParts) ? AttendFew<4, OfParts>(head, 0) : AttendFew<4, OfVectors>(head, 0);
  }

  template <int COUNT, template <int> typename Products>
  void AttendFew(const Head& head, int64_t query) const {
    for (; query + COUNT <= head.Queries(); query += COUNT) Few<Head, COUNT, Products<COUNT>>(head, query).Run();
    if constexpr (COUNT > 1) AttendFew<COUNT / 2, Products>(head, query);
  }

  // Pieces are blocks of queries. Those of a head are adjacent in all rows, as rows that begin alike share their pages.
  void Run(const Pool& pool) const {
    int64_t blocks = 0, most = 0;  // rows without queries have no block
    for (int64_t row = 0; row < a.rows; ++row) {
      blocks += Blocks(row);
      most = Blocks(row) > most ? Blocks(row) : most;
    }
    if constexpr (Head::kWrites)
      if (most > 1)
        ForEach(pool, a.rows * a.kv_heads, [this](int64_t head) {
          if (Blocks(head / a.kv_heads) > 1) Head(a, head / a.kv_heads, head % a.kv_heads).Write();
        });
    ForEach(pool, blocks * a.kv_heads, [this, blocks](int64_t piece) {
      int64_t row = 0, block = piece % blocks;
      for (; block >= Blocks(row); ++row) block -= Blocks(row);
      const Head head(a, row, piece / blocks);
      if constexpr (Head::kWrites)
        if (Blocks(row) == 1) head.Write();
      Attend(head, block);
    });
  }
};

}  // namespace
}  // namespace neuronx::NEURONX_LEVEL
