// The most likely token of each row, as in `layers/sampling.py`, in one pass over the logits.
#include "vectors.h"

namespace neuronx::NEURONX_LEVEL {
namespace {

constexpr int32_t kBroken = -2;  // a logit is NaN, or the largest is not finite
constexpr float kInfinity = __builtin_inff();

int32_t LikeliestOf(const float* logits, const int8_t* seen, int64_t count, float penalty) {
  Floats most = Floats{} - kInfinity, best = most;
  Ints at = {}, index = Count(), broken = {};
  for (int64_t i = 0; i < count; i += kLanes, index += kLanes) {
    const int64_t left = count - i;
    Floats x = Some(logits + i, left);
    if (left < kLanes) x = Count() < static_cast<int32_t>(left) ? x : Floats{} - kInfinity;
    broken |= x != x;
    most = x > most ? x : most;
    if (penalty != 1) x = Some(seen + i, left) != 0 ? (x < 0 ? x * penalty : x / penalty) : x;
    at = x > best ? index : at;
    best = x > best ? x : best;
  }
  float largest = -kInfinity, chosen = largest;
  int32_t token = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (broken[lane]) return kBroken;
    if (most[lane] > largest) largest = most[lane];
    if (best[lane] > chosen || (best[lane] == chosen && at[lane] < token)) {
      chosen = best[lane];
      token = at[lane];
    }
  }
  return largest > -kInfinity && largest < kInfinity ? token : kBroken;
}

}  // namespace

void Likeliest(const LikeliestArguments& a, const Pool& pool) {
  ForEach(pool, a.rows, [&a](int64_t row) {
    const int64_t first = row * a.vocabulary;
    a.token[row] = LikeliestOf(a.logits + first, a.seen + first, a.vocabulary, a.penalty[row]);
  });
}

}  // namespace neuronx::NEURONX_LEVEL
