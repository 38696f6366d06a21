// Linear layers in vectors: rows of activations and panels of weights are multiplied a tile at a time.
#pragma once

#include <type_traits>

#include "activations.h"
#include "coded.h"
#include "results.h"

namespace neuronx::NEURONX_LEVEL {
namespace {

// Rows of activations and panels of weights that are multiplied at once, limited by the number of registers.
constexpr int kRowsOfVectors = kLanes == 16 ? 8 : kLanes == 8 ? 6 : kRegisters == 32 ? 5 : 2;
constexpr int kPanels = kLanes == 16 ? 3 : 1;
constexpr int kColumns = kPanel / kLanes;  // vectors of a panel

constexpr int64_t kPage = 1024;             // words of 32 bits
constexpr int64_t kPieceBytes = 128 << 10;  // of weights: small against a core's cache, large against a piece's cost

// Weights are read as a stream. Processors prefetch streams by themselves, but not far enough ahead.
constexpr int64_t kAhead = 12 << 10;  // bytes

// Bytes of a panel that are multiplied with all rows before the next ones are: with few tiles of rows, and with many. With
// many, small parts of eight lanes take longer: they are few steps, between which sums are stored and loaded.
constexpr int64_t kPart = 4 << 10, kLargePart = kLanes == 8 ? 48 << 10 : kPart, kManyTiles = 6;

// Rows that are whole pages apart have their lines in the same set of the first-level cache. Now and then, so has each
// panel. A set has room for twelve lines in processors with AMX, and for eight in others.
#if defined(__AMX_BF16__)
constexpr int kRoom = 12;
#else
constexpr int kRoom = 8;
#endif

template <typename Kind>
struct Product {
  template <typename Each, int ROWS, int PANELS>
  using Tile = Each[ROWS][PANELS * kColumns];
  static constexpr int kSums = Kind::SPLIT && kRegisters == 32 && kLanes == 16 ? 2 : 1;  // of a row and an output, at once
  static constexpr int kRows = !Kind::MATRIX ? kRowsOfVectors / kSums : Kind::SPLIT ? 3 : 6;
  static_assert(kRows * kPanels * kColumns <= kMostSums);
  static constexpr int64_t kBlock = 64 / kRows * kRows;  // rows that share a piece of weights; few, so threads end together
  static constexpr bool kRounds = std::is_same<typename Kind::Sums, Floats>::value;  // sums depend on their order
  static constexpr int64_t kLine = kPanel * Kind::BYTES;  // bytes of a panel's adjacent words
  static constexpr int64_t kLineOfWords = kLine / Kind::WORDS, kParts = Kind::STEPS * Kind::PARTS;
  static constexpr int64_t kTwice = 1 + Kind::SPLIT;

  const LinearArguments& a;
  int64_t words, run, runs;  // of an output; that are summed before scales are applied; number of such sums
  Groups groups;
  int64_t panel_bytes;
  int64_t blocks;  // of rows
  Pieces pieces;   // of each
  bool in_place;   // whether activations are used without a copy
  int64_t length, stride;  // words of a row of activations, and from one to the next
  int32_t* x;      // [rows, stride]: the activations of all parts, then of each run the initial sum, factor and total
  float* factors;  // [rows]

  explicit Product(const LinearArguments& a) : a(a) {
    const int64_t together = a.rounded ? a.rounded : a.group;
    words = RoundUp(a.inputs, kInputs<Kind>) / kInputs<Kind>;
    run = together ? together / kInputs<Kind> : Kind::RUN;
    runs = RoundUp(words, run) / run;
    groups = Groups(a, runs);
    panel_bytes = words * kLine;
    blocks = RoundUp(a.rows, kBlock) / kBlock;
    pieces = Pieces(a, a.rows < 2 * kBlock ? RoundUp(kPieceBytes / panel_bytes + 1, kPanels) : kPanels);
    length = RoundUp(words * kParts, kTwice) * kTwice;
    in_place = Prepared(a, static_cast<typename Kind::Active*>(nullptr)) && a.inputs % kInputs<Kind> == 0 &&
               !a.HasMinima() &&
               (kRows + kPanels <= kRoom || a.rows == 1 || length % kPage != 0);
    stride = in_place ? length : RoundUp(length + 3 * runs, kPanel) + kPanel;
    factors = static_cast<float*>(a.scratch);
    x = static_cast<int32_t*>(in_place ? const_cast<void*>(a.x) : factors + RoundUp(a.rows, kPanel));
  }

  int64_t Bytes() const { return (RoundUp(a.rows, kPanel) + (in_place ? 0 : a.rows * stride)) * sizeof *x; }
  int32_t* Begins(int64_t i) const { return x + i * stride + length; }
  float* Factors(int64_t row) const { return reinterpret_cast<float*>(Begins(row) + runs); }
  float* Totals(int64_t row) const { return Factors(row) + runs; }  // by which minima are multiplied

  // Returns the number of rows to prepare.
  int64_t Start() const {
    for (int64_t row = 0; row < a.rows; ++row) factors[row] = 1;
    return in_place ? 0 : a.rows;
  }

  void PrepareRow(int64_t row) const {
    auto* active = reinterpret_cast<typename Kind::Active*>(x + row * stride);
    if constexpr (std::is_same<typename Kind::Sums, Ints>::value) {
      PrepareWhole(row, active);
    } else {
      Prepare(a, row * a.inputs, active);
      memset(active + a.inputs, 0, (words * kInputs<Kind> - a.inputs) * sizeof *active);  // the rest of the last word
      if constexpr (std::is_same<typename Kind::Active, float>::value) {
        for (int64_t i = 0; i < runs && a.HasMinima(); ++i) {
          float sum = 0;
          for (int64_t j = 0; j < run * kInputs<Kind>; ++j) sum += active[i * run * kInputs<Kind> + j];
          Totals(row)[i] = sum;
        }
      }
    }
  }

  void PrepareWhole(int64_t row, typename Kind::Active* active) const {
    const int64_t first = row * a.inputs, together = run * kInputs<Kind>;
    if (!a.rounded) factors[row] = Round<Kind>(a, first, a.inputs, active);
    for (int64_t i = 0; i < runs && a.rounded; ++i) {
      const int64_t at = i * together;
      Factors(row)[i] = Round<Kind>(a, first + at, Least(a.inputs - at, together), active + at);
    }
    for (int64_t i = 0; i < runs && (Kind::OFFSET || a.HasMinima()); ++i) {
      const int32_t sum = Kind::Sum(active, i * together, Least(words * kInputs<Kind>, (i + 1) * together));
      Begins(row)[i] = -Kind::OFFSET * sum;
      Totals(row)[i] = a.rounded ? Factors(row)[i] * sum : sum;
    }
  }

  // Runs `first` to `past` of some panels from `panel` on, which are multiplied with some rows from `row` on.
  struct Span {
    const Weight& weight;
    int64_t panel, row, first, past;
  };

  // Adds the products of a span to totals, or begins these with its first run. Also prefetches ASKS panels, `ahead` bytes
  // further on. Not inlined, so that sums have all registers.
  template <int ROWS, int PANELS, int ASKS>
  __attribute__((noinline)) void Multiply(const Span& span, int64_t ahead, Tile<Floats, ROWS, PANELS>& results) const {
    const auto& [weight, panel, row, first, past] = span;
    Tile<Floats, ROWS, PANELS> totals;
    const char* at = static_cast<const char*>(weight.data) + panel * panel_bytes + first * run * kLine;
    const int32_t* active = x + row * stride + first * RoundUp(run * kParts, kTwice) * kTwice;
    if (first) memcpy(totals, results, sizeof totals);
    else UNROLL for (auto& each : totals) UNROLL for (Floats& total : each) total = Floats{};
    for (int64_t i = first, unit = first / groups.block, left = groups.block - first % groups.block; i < past; ++i) {
      Tile<typename Kind::Sums, ROWS, PANELS> sums = {};
      if constexpr (Kind::OFFSET != 0)
        UNROLL for (int j = 0; j < ROWS; ++j)
          UNROLL for (auto& sum : sums[j]) sum += Begins(row + j)[i];
      int64_t end = Least(words - i * run, run);
#if defined(__aarch64__)
      if constexpr (Kind::MATRIX && (ROWS > 1 || kRounds || Kind::SPLIT))
        end -= AddMatrices<ROWS, PANELS, ASKS>(at, active, end, ahead, sums);
#endif
      if constexpr (Kind::SPLIT) end -= AddSplit<ROWS, PANELS, ASKS>(at, active, end, ahead, sums);
      for (; end > 0; --end, at += kLine) {
        UNROLL for (int j = 0; j < ASKS * Kind::WORDS; ++j)
          __builtin_prefetch(at + ahead + j / Kind::WORDS * panel_bytes + j % Kind::WORDS * kLineOfWords, 0, 2);
        for (int step = 0; step < Kind::STEPS; ++step, active += Kind::PARTS) {
          typename Kind::Words w[PANELS * kColumns];
          ReadWords<PANELS>(at, step, w);
          AddPart<ROWS, PANELS, 1, 0>(w, active, sums);
        }
      }
      UNROLL for (int j = 0; j < PANELS * kColumns; ++j) {
        if (a.group) {
          const Floats scale = groups.Of(weight.scale, weight.scale_unit, panel + j / kColumns, i, unit, j % kColumns);
          UNROLL for (int k = 0; k < ROWS; ++k)
            totals[k][j] += AsFloats(sums[k][j]) * (Kind::ROUNDED ? scale * Factors(row + k)[i] : scale);
          if (weight.minimum) {
            const Floats minimum =
                groups.Of(weight.minimum, weight.minimum_unit, panel + j / kColumns, i, unit, j % kColumns);
            const Floats zero = minimum - scale * Kind::LEAST;
            UNROLL for (int k = 0; k < ROWS; ++k) totals[k][j] += zero * Totals(row + k)[i];
          }
        } else {
          UNROLL for (int k = 0; k < ROWS; ++k)
            totals[k][j] += Kind::ROUNDED ? AsFloats(sums[k][j]) * Factors(row + k)[i] : AsFloats(sums[k][j]);
        }
      }
      if (--left == 0) ++unit, left = groups.block;
    }
    memcpy(results, totals, sizeof totals);
  }

  // Reads the words of one step of a line of some panels.
  template <int PANELS>
  __attribute__((always_inline)) void ReadWords(const char* line, [[maybe_unused]] int step,
                                                typename Kind::Words (&w)[PANELS * kColumns]) const {
    UNROLL for (int j = 0; j < PANELS * kColumns; ++j) {
      const char* word = line + j / kColumns * panel_bytes + j % kColumns * (kLineOfWords / kColumns);
      if constexpr (Kind::STEPS == 1) w[j] = Kind::Read(word);
      else w[j] = Kind::Read(word, step);
    }
  }

  // Adds the products of one part of the words, and of the following parts, with a row, or several BYTES of it that each have
  // sums of their own. Without inlining, sums would be in memory.
  template <int ROWS, int PANELS, int BYTES, int PART>
  __attribute__((always_inline)) void AddPart(const typename Kind::Words (&w)[PANELS * kColumns], const int32_t* active,
                                              Tile<typename Kind::Sums, ROWS * BYTES, PANELS>& sums) const {
    if constexpr (PART < Kind::PARTS) {
      typename Kind::Vector part[PANELS * kColumns];
      UNROLL for (int i = 0; i < PANELS * kColumns; ++i) part[i] = Kind::template Part<PART>(w[i]);
      UNROLL for (int row = 0; row < ROWS * BYTES; ++row) {
        const auto same = Kind::Repeat(active + row / BYTES * stride + row % BYTES * 2 + PART);
        UNROLL for (int i = 0; i < PANELS * kColumns; ++i) sums[row][i] = Kind::Add(sums[row][i], part[i], same);
      }
      AddPart<ROWS, PANELS, BYTES, PART + 1>(w, active, sums);
    }
  }

  // Adds the products of words with activations in two bytes: of both at once, or of the high bytes first. Returns the
  // words, and moves on.
  template <int ROWS, int PANELS, int ASKS>
  __attribute__((always_inline)) int64_t AddSplit(const char*& at, const int32_t*& active, int64_t count, int64_t ahead,
                                                  Tile<typename Kind::Sums, ROWS, PANELS>& sums) const {
    Tile<typename Kind::Sums, ROWS * kSums, PANELS> own = {};
    for (int low = 0; low < 2; low += kSums) {
      const char* line = at;
      for (int64_t i = 0; i < count; ++i, line += kLine) {
        UNROLL for (int j = 0; j < ASKS * Kind::WORDS * (1 - low); ++j)
          __builtin_prefetch(line + ahead + j / Kind::WORDS * panel_bytes + j % Kind::WORDS * kLineOfWords, 0, 2);
        for (int step = 0; step < Kind::STEPS; ++step) {
          typename Kind::Words w[PANELS * kColumns];
          ReadWords<PANELS>(line, step, w);
          const int64_t part = (i * Kind::STEPS + step) * Kind::PARTS;  // there is one, or they are two
          AddPart<ROWS, PANELS, kSums, 0>(w, active + part / 2 * 4 + part % 2 + 2 * low, own);
        }
      }
      UNROLL for (int row = 0; row < ROWS; ++row)
        UNROLL for (int i = 0; i < PANELS * kColumns; ++i) {
          if constexpr (kSums == 2) {  // with OFFSET they may leave 32 bits, and come back
            const UInts both = Cast<UInts>(own[2 * row][i]) * 256 + Cast<UInts>(own[2 * row + 1][i]);
            sums[row][i] = Cast<Ints>(Cast<UInts>(sums[row][i]) + both);
          } else {
            low ? sums[row][i] += own[row][i] : own[row][i] *= 256;
          }
        }
    }
    at += count * kLine, active += RoundUp(count * kParts, 2) * 2;
    return count;
  }

#if defined(__aarch64__)
  template <int ROWS, int PANELS>
  using Matrices = typename Kind::Sums[Kind::SPLIT ? ROWS : (ROWS + 1) / 2][PANELS * kColumns][2];

  // Adds the products of pairs of parts, of the same word or of two, as products of matrices: of two outputs, and of two
  // rows, or the last one twice, or the two bytes of a row. Returns how many words these are, and moves on. Where sums are
  // rounded, a single row is multiplied so, too: its sums must not depend on others.
  template <int ROWS, int PANELS, int ASKS>
  __attribute__((always_inline)) int64_t AddMatrices(const char*& at, const int32_t*& active, int64_t count, int64_t ahead,
                                                     Tile<typename Kind::Sums, ROWS, PANELS>& sums) const {
    constexpr int kWords = Kind::PARTS == 1 ? 2 : 1;
    Matrices<ROWS, PANELS> found = {};
    int64_t done = 0;
    for (; done + kWords <= count; done += kWords, at += kWords * kLine, active += kWords * Kind::PARTS * kTwice) {
      UNROLL for (int j = 0; j < ASKS * kWords; ++j)
        __builtin_prefetch(at + ahead + j / kWords * panel_bytes + j % kWords * kLine, 0, 2);
      UNROLL for (int i = 0; i < PANELS * kColumns; ++i) {
        const char* word = at + i / kColumns * panel_bytes + i % kColumns * (kLine / kColumns);
        const auto first = Kind::Read(word), second = Kind::PARTS == 1 ? Kind::Read(word + kLine) : first;
        AddMatrix<ROWS, PANELS>(i, Kind::template Part<0>(first), Kind::template Part<Kind::PARTS - 1>(second), active, found);
      }
    }
    UNROLL for (int row = 0; row < ROWS; ++row)
      UNROLL for (int i = 0; i < PANELS * kColumns; ++i) {
        const auto& own = found[Kind::SPLIT ? row : row / 2][i];
        const auto low = Cast<int64x2_t>(own[0]), high = Cast<int64x2_t>(own[1]);
        const auto even = Cast<typename Kind::Sums>(vtrn1q_s64(low, high));
        const auto odd = Cast<typename Kind::Sums>(vtrn2q_s64(low, high));
        sums[row][i] += Kind::SPLIT ? even * 256 + odd : row % 2 ? odd : even;
      }
    return done;
  }

  // Adds the products of two parts of some outputs.
  template <int ROWS, int PANELS>
  __attribute__((always_inline)) void AddMatrix(int column, typename Kind::Vector first, typename Kind::Vector second,
                                                const int32_t* active, Matrices<ROWS, PANELS>& found) const {
    using Active = decltype(Kind::Repeat(active));
    const auto low = Cast<typename Kind::Vector>(vzip1q_s32(Cast<int32x4_t>(first), Cast<int32x4_t>(second)));
    const auto high = Cast<typename Kind::Vector>(vzip2q_s32(Cast<int32x4_t>(first), Cast<int32x4_t>(second)));
    constexpr int kCount = Kind::SPLIT ? ROWS : (ROWS + 1) / 2;
    UNROLL for (int i = 0; i < kCount; ++i) {
      const int32_t* row = active + (Kind::SPLIT ? i : 2 * i) * stride;
      const int32_t* next = Kind::SPLIT ? row + 2 : 2 * i + 1 < ROWS ? row + stride : row;
      const auto x = Cast<Active>(vcombine_s32(vld1_s32(row), vld1_s32(next)));
      found[i][column][0] = Kind::AddMatrix(found[i][column][0], low, x);
      found[i][column][1] = Kind::AddMatrix(found[i][column][1], high, x);
    }
  }
#endif

  template <int ROWS>
  void Work(int part, int64_t panel, int64_t row) const {
    Tile<Floats, ROWS, 1> totals[2];
    for (int i = 0; i < 1 + a.Gated(); ++i) {
      const Weight& weight = a.weights[part + i];
      Multiply<ROWS, 1, 1>({weight, panel, row, 0, runs}, Least(kAhead, After(weight, panel + 1)), totals[i]);
    }
    Results<ROWS, 1>(part, panel, row, totals[0], totals[1]);
  }

  // Bytes from a span to the one after it: of the next words of its panels, or of the first ones of the next panels. All that
  // is prefetched belongs to the weight.
  template <int PANELS>
  int64_t Ahead(const Span& span) const {
    const int64_t begin = span.first * run, count = Least(words, span.past * run) - begin;
    if (span.past < runs) return Least(count, words - count - begin) * kLine;
    return Least(PANELS * panel_bytes, After(span.weight, span.panel + PANELS)) - begin * kLine;
  }

  // Bytes of a weight from a panel on.
  int64_t After(const Weight& weight, int64_t panel) const {
    return (RoundUp(weight.outputs, kPanel) / kPanel - panel) * panel_bytes;
  }

  template <int ROWS, int PANELS>
  void Results(int part, int64_t panel, int64_t row, const Tile<Floats, ROWS, PANELS>& totals,
               const Tile<Floats, ROWS, PANELS>& up) const {
    const int64_t output = panel * kPanel, count = Least(a.weights[part].outputs - output, PANELS * kPanel);
    Store(a, a.weights[part], row, ROWS, factors + row, output, count, PANELS * kColumns, totals[0], up[0]);
  }

  // Works on `rows` rows, which are fewer than ROWS.
  template <int ROWS>
  void WorkFew(int part, int64_t panel, int64_t row, int64_t rows) const {
    if constexpr (ROWS > 1) {
      if (rows == ROWS - 1) return Work<ROWS - 1>(part, panel, row);
      WorkFew<ROWS - 1>(part, panel, row, rows);
    }
  }

  // Works on some tiles of rows that use the same panels: on a part of the panels with all rows, then on the next part,
  // so that from the second tile on, weights are in the first-level cache. Each line of the weights after these is
  // prefetched by only one tile.
  template <int PANELS>
  void WorkTiles(int part, int64_t panel, int64_t row, int64_t turns) const {
    Tile<Floats, kRows, PANELS> totals[2][kBlock / kRows];
    const int64_t parts = panel_bytes / (turns < kManyTiles ? kPart : kLargePart);
    const int64_t pace = turns == 1 || parts < 2 ? runs : RoundUp(runs, parts) / parts;
    for (int64_t first = 0; first < runs; first += pace) {
      const int64_t past = Least(runs, first + pace);
      for (int i = 0; i < 1 + a.Gated(); ++i)
        for (int64_t turn = 0; turn < turns; ++turn) {
          const Span span{a.weights[part + i], panel, row + turn * kRows, first, past};
          auto& own = totals[i][turn];
          if (turn >= (turns < PANELS ? 1 : PANELS)) Multiply<kRows, PANELS, 0>(span, 0, own);
          else if (turns < PANELS) Multiply<kRows, PANELS, PANELS>(span, Ahead<PANELS>(span), own);
          else Multiply<kRows, PANELS, 1>(span, Ahead<PANELS>(span) + turn * panel_bytes, own);
        }
    }
    for (int64_t turn = 0; turn < turns; ++turn)
      Results<kRows, PANELS>(part, panel, row + turn * kRows, totals[0][turn], totals[1][turn]);
  }

  void WorkAll(int part, int64_t panel, int64_t panels, int64_t row, int64_t rows) const {
    const int64_t turns = rows / kRows, rest = row + turns * kRows;
    int64_t i = 0;
    for (; turns && i + kPanels <= panels; i += kPanels) WorkTiles<kPanels>(part, panel + i, row, turns);
    for (; turns && i < panels; ++i) WorkTiles<1>(part, panel + i, row, turns);
    for (i = 0; i < panels; ++i) WorkFew<kRows>(part, panel + i, rest, rows % kRows);
  }

  int64_t Count() const { return pieces.count * blocks; }

  void WorkPiece(int64_t i) const {
    const auto [part, panel] = pieces.At(i / blocks);
    const int64_t row = i % blocks * kBlock, panels = RoundUp(a.weights[part].outputs, kPanel) / kPanel;
    WorkAll(part, panel, Least(panels - panel, pieces.panels), row, Least(a.rows - row, kBlock));
  }
};

}  // namespace
}  // namespace neuronx::NEURONX_LEVEL
