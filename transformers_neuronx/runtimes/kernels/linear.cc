// The product of activations and weights, as in `layers/linear.py`.
#include <type_traits>

#include "coded.h"
#include "results.h"
#include "tiles.h"

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
  static constexpr int kRows = !Kind::MATRIX ? kRowsOfVectors : Kind::SPLIT ? 3 : 6;
  static_assert(kRows * kPanels * kColumns <= kMostSums);
  static constexpr int64_t kBlock = 64 / kRows * kRows;  // rows that share a piece of weights; few, so threads end together
  static constexpr bool kRounds = std::is_same<typename Kind::Sums, Floats>::value;  // sums depend on their order
  static constexpr int64_t kLine = kPanel * Kind::BYTES;  // bytes of a panel's adjacent words
  static constexpr int64_t kLineOfWords = kLine / Kind::WORDS, kParts = Kind::STEPS * Kind::PARTS;
  static constexpr int64_t kTwice = 1 + Kind::SPLIT;

  const LinearArguments& a;
  int64_t words, run, runs;  // of an output; that are summed before scales are applied; number of such sums
  int64_t block;             // runs that share a unit of scales
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
    block = a.block ? a.block / a.group : runs;
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
      int32_t sum = 0;
      for (int64_t j = i * together; j < Least(words * kInputs<Kind>, (i + 1) * together); ++j)
        sum += Kind::Get(active, j);
      Begins(row)[i] = -Kind::OFFSET * sum;
      Totals(row)[i] = a.rounded ? Factors(row)[i] * sum : sum;
    }
  }

  // Also prefetches ASKS panels, `ahead` bytes further on. Not inlined, so that sums have all registers.
  template <int ROWS, int PANELS, int ASKS>
  __attribute__((noinline)) void Multiply(const Weight& weight, int64_t panel, int64_t row, int64_t ahead,
                                          Tile<Floats, ROWS, PANELS>& results) const {
    Tile<Floats, ROWS, PANELS> totals;
    const char* at = static_cast<const char*>(weight.data) + panel * panel_bytes;
    const int32_t* active = x + row * stride;
    UNROLL for (auto& each : totals) UNROLL for (Floats& total : each) total = Floats{};
    for (int64_t i = 0, unit = 0, left = block; i < runs; ++i) {
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
          AddPart<ROWS, PANELS, 0>(w, active, sums);
        }
      }
      UNROLL for (int j = 0; j < PANELS * kColumns; ++j) {
        if (a.group) {
          const Floats scale = OfGroup(weight.scale, weight.scale_unit, panel + j / kColumns, i, unit, j % kColumns);
          UNROLL for (int k = 0; k < ROWS; ++k)
            totals[k][j] += AsFloats(sums[k][j]) * (Kind::ROUNDED ? scale * Factors(row + k)[i] : scale);
          if (weight.minimum) {
            const Floats minimum =
                OfGroup(weight.minimum, weight.minimum_unit, panel + j / kColumns, i, unit, j % kColumns);
            const Floats zero = minimum - scale * Kind::LEAST;
            UNROLL for (int k = 0; k < ROWS; ++k) totals[k][j] += zero * Totals(row + k)[i];
          }
        } else {
          UNROLL for (int k = 0; k < ROWS; ++k)
            totals[k][j] += Kind::ROUNDED ? AsFloats(sums[k][j]) * Factors(row + k)[i] : AsFloats(sums[k][j]);
        }
      }
      if (--left == 0) ++unit, left = block;
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

  // Adds the products of one part of the words, and of the following parts. Without inlining, sums would be in memory.
  template <int ROWS, int PANELS, int PART>
  __attribute__((always_inline)) void AddPart(const typename Kind::Words (&w)[PANELS * kColumns], const int32_t* active,
                                              Tile<typename Kind::Sums, ROWS, PANELS>& sums) const {
    if constexpr (PART < Kind::PARTS) {
      typename Kind::Vector part[PANELS * kColumns];
      UNROLL for (int i = 0; i < PANELS * kColumns; ++i) part[i] = Kind::template Part<PART>(w[i]);
      UNROLL for (int row = 0; row < ROWS; ++row) {
        const auto same = Kind::Repeat(active + row * stride + PART);
        UNROLL for (int i = 0; i < PANELS * kColumns; ++i) sums[row][i] = Kind::Add(sums[row][i], part[i], same);
      }
      AddPart<ROWS, PANELS, PART + 1>(w, active, sums);
    }
  }

  // Adds the products of words with activations in two bytes: of the high bytes first. Returns the words, and moves on.
  template <int ROWS, int PANELS, int ASKS>
  int64_t AddSplit(const char*& at, const int32_t*& active, int64_t count, int64_t ahead,
                   Tile<typename Kind::Sums, ROWS, PANELS>& sums) const {
    Tile<typename Kind::Sums, ROWS, PANELS> own = {};
    for (int low = 0; low < 2; ++low) {
      const char* line = at;
      for (int64_t i = 0; i < count; ++i, line += kLine) {
        UNROLL for (int j = 0; j < ASKS * Kind::WORDS * (1 - low); ++j)
          __builtin_prefetch(line + ahead + j / Kind::WORDS * panel_bytes + j % Kind::WORDS * kLineOfWords, 0, 2);
        for (int step = 0; step < Kind::STEPS; ++step) {
          typename Kind::Words w[PANELS * kColumns];
          ReadWords<PANELS>(line, step, w);
          const int64_t part = (i * Kind::STEPS + step) * Kind::PARTS;  // there is one, or they are two
          AddPart<ROWS, PANELS, 0>(w, active + part / 2 * 4 + part % 2 + 2 * low, own);
        }
      }
      UNROLL for (int row = 0; row < ROWS; ++row)
        UNROLL for (int i = 0; i < PANELS * kColumns; ++i)
          low ? sums[row][i] += own[row][i] : own[row][i] *= 256;
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

  // The scales or minima of one group for a vector of outputs. With units, it is a product without rounding.
  Floats OfGroup(const void* parts, const void* units, int64_t panel, int64_t group, int64_t unit, int column) const {
    const int64_t at = (panel * runs + group) * kPanel + column * kLanes;
    if (!units) return AsScales(parts, at);
    const int64_t unit_at = (panel * (runs / block) + unit) * kPanel + column * kLanes;
    return Widened(static_cast<const int8_t*>(parts) + at) * AsScales(units, unit_at);
  }

  Floats AsScales(const void* parts, int64_t at) const {
    switch (a.scale_type) {
      case Type::kBF16: return Widened(static_cast<const BFloat16*>(parts) + at);
      case Type::kF16: return Widened(static_cast<const Float16*>(parts) + at);
      default: return Widened(static_cast<const float*>(parts) + at);
    }
  }

  template <int ROWS, int PANELS, int ASKS>
  void Work(int part, int64_t panel, int64_t row, int64_t ahead) const {
    Tile<Floats, ROWS, PANELS> totals[2];
    for (int i = 0; i < 1 + a.Gated(); ++i)
      Multiply<ROWS, PANELS, ASKS>(a.weights[part + i], panel, row, ahead, totals[i]);
    const int64_t output = panel * kPanel, count = Least(a.weights[part].outputs - output, PANELS * kPanel);
    Store(a, a.weights[part], row, ROWS, factors + row, output, count, PANELS * kColumns, totals[0][0], totals[1][0]);
  }

  // Works on `rows` rows, which are fewer than ROWS.
  template <int ROWS>
  void WorkFew(int part, int64_t panel, int64_t row, int64_t rows) const {
    if constexpr (ROWS > 1) {
      if (rows == ROWS - 1) return Work<ROWS - 1, 1, 1>(part, panel, row, kAhead);
      WorkFew<ROWS - 1>(part, panel, row, rows);
    }
  }

  // Works on one of `turns` tiles that use the same panels. Each of the next panels is prefetched by only one tile:
  // prefetching takes time, a tenth of the total if all tiles do it.
  template <int PANELS>
  void WorkTile(int part, int64_t panel, int64_t row, int64_t turn, int64_t turns) const {
    if (turns < PANELS) return Work<kRows, PANELS, PANELS>(part, panel, row, PANELS * panel_bytes);
    if (turn < PANELS) return Work<kRows, PANELS, 1>(part, panel, row, (PANELS + turn) * panel_bytes);
    Work<kRows, PANELS, 0>(part, panel, row, 0);
  }

  void WorkAll(int part, int64_t panel, int64_t panels, int64_t row, int64_t rows) const {
    const int64_t turns = rows / kRows;
    for (int64_t turn = 0; turn < turns; ++turn, row += kRows) {
      int64_t i = 0;
      for (; i + kPanels <= panels; i += kPanels) WorkTile<kPanels>(part, panel + i, row, turn, turns);
      for (; i < panels; ++i) WorkTile<1>(part, panel + i, row, turn, turns);
    }
    for (int64_t i = 0; i < panels; ++i) WorkFew<kRows>(part, panel + i, row, rows % kRows);
  }

  int64_t Count() const { return pieces.count * blocks; }

  void WorkPiece(int64_t i) const {
    const auto [part, panel] = pieces.At(i / blocks);
    const int64_t row = i % blocks * kBlock, panels = RoundUp(a.weights[part].outputs, kPanel) / kPanel;
    WorkAll(part, panel, Least(panels - panel, pieces.panels), row, Least(a.rows - row, kBlock));
  }
};

// Calls `use` with the product of the arguments' kind.
template <typename Use>
void WithKind(const LinearArguments& a, const Use& use) {
  if (WithTiles(a, use)) return;
  const bool wide = a.x_type == Type::kF32;
  if (a.rounded) {
    switch (a.weight_type) {
      case Type::kS8: return use(Product<ByteS8>(a));
      case Type::kS5: return use(Product<BytePlanes<1>>(a));
      case Type::kS6: return use(Product<BytePlanes<2>>(a));
      default: return use(Product<ByteS4>(a));
    }
  }
  switch (a.weight_type) {
    case Type::kF32: return use(Product<F32>(a));
    case Type::kBF16: return use(Product<BF16>(a));
    case Type::kF16: return use(Product<F16>(a));
    case Type::kS8: return wide ? use(Product<WideS8>(a)) : a.group % 8 ? use(Product<S8>(a)) : use(Product<SplitS8>(a));
    case Type::kF8: return a.x_type == Type::kBF16 ? use(Product<F8>(a)) : use(Product<WideF8>(a));
    case Type::kE2M1: return a.x_type == Type::kBF16 ? use(Product<E2M1>(a)) : use(Product<WideE2M1>(a));
    case Type::kNF4: return use(Product<WideNF4>(a));
    case Type::kFP4: return use(Product<WideFP4>(a));
    case Type::kS4: return wide ? use(Product<WideS4>(a)) : use(Product<SplitS4>(a));
    case Type::kS5: return wide ? use(Product<WidePlanes<1>>(a)) : use(Product<SplitPlanes<1>>(a));
    case Type::kS6: return wide ? use(Product<WidePlanes<2>>(a)) : use(Product<SplitPlanes<2>>(a));
  }
}

// The product that has this one of the rows or pieces of all: the last one that begins at it or before.
template <typename First>
const LinearArguments& Owner(const LinearArguments* products, int64_t count, int64_t at, const First& first) {
  int64_t own = 0;
  for (int64_t end = count; end - own > 1;) {
    const int64_t middle = (own + end) / 2;
    (first(products[middle]) <= at ? own : end) = middle;
  }
  return products[own];
}

// Computes several products. The threads share the work of all, so they wait for each other twice, not twice for each.
void RunTogether(LinearArguments* products, int64_t count, const Pool& pool) {
  int64_t rows = 0, pieces = 0;
  for (int64_t i = 0; i < count; ++i)
    WithKind(products[i], [&](const auto& product) {
      products[i].first_row = rows, products[i].first_piece = pieces;
      rows += product.Start(), pieces += product.Count();
    });
  ForEach(pool, rows, [&](int64_t row) {
    const auto& own = Owner(products, count, row, [](const auto& each) { return each.first_row; });
    WithKind(own, [&](const auto& product) { product.PrepareRow(row - own.first_row); });
  });
  ForEach(pool, pieces, [&](int64_t piece) {
    const auto& own = Owner(products, count, piece, [](const auto& each) { return each.first_piece; });
    WithKind(own, [&](const auto& product) { product.WorkPiece(piece - own.first_piece); });
  });
}

}  // namespace

int64_t LinearScratch(const LinearArguments& arguments) {
  int64_t bytes = 0;
  WithKind(arguments, [&](const auto& product) { bytes = product.Bytes(); });
  return bytes;
}

void Linear(LinearArguments* products, int64_t count, const Pool& pool) {
  if (count > 1) return RunTogether(products, count, pool);
  WithKind(*products, [&](const auto& product) { Run(product, pool); });
}

}  // namespace neuronx::NEURONX_LEVEL
