// The product of activations and weights, as `layers/linear.py` has it.
#include "few.h"
#include "many.h"

namespace neuronx::NEURONX_LEVEL {
namespace {

constexpr int64_t kFew = 16;  // rows, for which weights are not worth laying out anew

// `use` with the product of the arguments' kind.
template <typename Use>
void WithKind(const LinearArguments& a, const Use& use) {
  if (a.rows > kFew && a.x_type == Type::kBF16) return use(Many<Halves>(a));
  if (a.rows > kFew) return use(Many<F32>(a));
  switch (a.weight_type) {
    case Type::kF32: return use(Few<F32>(a));
    case Type::kBF16: return use(Few<BF16>(a));
    case Type::kF16: return use(Few<F16>(a));
    case Type::kS8: return use(Few<S8>(a));
    case Type::kS4: return use(Few<S4>(a));
  }
}

}  // namespace

int64_t LinearScratch(const LinearArguments& arguments) {
  int64_t bytes = 0;
  WithKind(arguments, [&](const auto& product) { bytes = product.Bytes(); });
  return bytes;
}

void Linear(const LinearArguments& arguments, const Pool& pool) {
  WithKind(arguments, [&](const auto& product) { product.Run(pool); });
}

}  // namespace neuronx::NEURONX_LEVEL
