// The product of activations and weights, as in `layers/linear.py`.
#include "product.h"
#include "tiles.h"

namespace neuronx::NEURONX_LEVEL {
namespace {

// Most rows whose activations are multiplied in two bytes, with sums of their own for each, if both are summed at once. For
// more, weights would be split once for half as many rows. Sums are integers, the same ones either way.
constexpr int64_t kFewSplit = 4;

// Calls `use` with the product of activations in 16 bits: in two bytes, if there are such products and few rows, or not.
template <typename Split, typename Whole, typename Use>
void WithSixteen(const LinearArguments& a, const Use& use) {
  if (Product<Split>::kSums == 2 && a.rows > kFewSplit) return use(Product<Whole>(a));
  use(Product<Split>(a));
}

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
    case Type::kS8:
      if (wide) return use(Product<WideS8>(a));
      return a.group % 8 ? use(Product<S8>(a)) : WithSixteen<SplitS8, S8>(a, use);
    case Type::kF8: return a.x_type == Type::kBF16 ? use(Product<F8>(a)) : use(Product<WideF8>(a));
    case Type::kE2M1: return a.x_type == Type::kBF16 ? use(Product<E2M1>(a)) : use(Product<WideE2M1>(a));
    case Type::kNF4: return use(Product<WideNF4>(a));
    case Type::kFP4: return use(Product<WideFP4>(a));
    case Type::kS4: return wide ? use(Product<WideS4>(a)) : WithSixteen<SplitS4, S4>(a, use);
    case Type::kS5: return wide ? use(Product<WidePlanes<1>>(a)) : WithSixteen<SplitPlanes<1>, WholePlanes<1>>(a, use);
    case Type::kS6: return wide ? use(Product<WidePlanes<2>>(a)) : WithSixteen<SplitPlanes<2>, WholePlanes<2>>(a, use);
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
