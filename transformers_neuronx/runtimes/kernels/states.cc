// Layers that keep states of sequences, as in `layers/convolution.py`, `layers/delta_net.py` and `layers/mamba.py`.
//
// Each token is computed after the one before it and in one order of sums, so the division of a sequence into steps does
// not change bits.
#include "results.h"

namespace neuronx::NEURONX_LEVEL {
namespace {

// What a step has of sequence `number`; without tokens if its places are none.
struct Sequence {
  int64_t first, count, before, after;
  bool fresh;  // its states are zeros before

  Sequence(const StepArguments& step, int64_t number) {
    const int32_t* row = step.table + number * kSequenceColumns;
    first = row[0], count = row[1], fresh = row[2] == 0, before = row[3], after = row[4];
    const auto inside = [&](int64_t place) { return place >= 0 && place < step.places; };
    count = first < 0 || !inside(before) || !inside(after) ? 0 : Least(count, step.tokens - first);
  }
};

// Sets the results of tokens that no sequence has, [tokens, size], to zero.
void ClearOthers(const StepArguments& step, int64_t size, float* y) {
  int64_t done = 0;
  const auto clear = [&](int64_t until) {
    if (until > done) memset(y + done * size, 0, (until - done) * size * sizeof *y);
    done = until > done ? until : done;
  };
  for (int64_t number = 0; number < step.sequences; ++number) {
    const Sequence sequence(step, number);
    if (sequence.count <= 0) continue;
    clear(sequence.first);
    const int64_t end = sequence.first + sequence.count;
    done = end > done ? end : done;
  }
  clear(step.tokens);
}

constexpr int kColumns = 4;  // vectors of features, so that whole lines of memory are read

template <typename Number>
struct Convolution {
  const ConvolutionArguments& a;

  void Run(const Sequence& sequence, int64_t feature) const {
    for (int column = 0; column < kColumns && feature < a.features; ++column, feature += kLanes)
      Features(sequence, feature, Least(a.features - feature, kLanes));
  }

  void Features(const Sequence& sequence, int64_t feature, int64_t count) const {
    const int64_t kept = a.size - 1;
    Floats window[kMostTaps], weights[kMostTaps];
    for (int64_t i = 0; i < a.size; ++i) weights[i] = Some(a.weight + i * a.features + feature, count);
    const Floats bias = a.bias ? Some(a.bias + feature, count) : Floats{};
    for (int64_t i = 0; i < kept; ++i)
      window[i] = sequence.fresh ? Floats{} : Some(State(sequence.before, i) + feature, count);
    for (int64_t token = sequence.first; token < sequence.first + sequence.count; ++token) {
      window[kept] = Some(static_cast<const Number*>(a.x) + token * a.features + feature, count);
      Floats y = bias;
      for (int64_t i = 0; i < a.size; ++i) y += window[i] * weights[i];
      PutSome(Activated(a.activation, y), count, a.y + token * a.features + feature);
      for (int64_t i = 0; i < kept; ++i) window[i] = window[i + 1];
    }
    for (int64_t i = 0; i < kept; ++i) PutSome(window[i], count, State(sequence.after, i) + feature);
  }

  float* State(int64_t place, int64_t i) const { return a.state + (place * (a.size - 1) + i) * a.features; }
};

// Some columns of the memory of one head of one sequence. They stay in a core's nearest cache for all tokens. By the
// delta rule, queries and keys are scaled, and a token corrects what the memory has for its key; otherwise it adds to it.
template <bool kDelta>
struct LinearAttention {
  static constexpr int kWide = 2, kTogether = 4;  // vectors of a row; rows with sums of their own
  static constexpr int64_t kBlock = kWide * kLanes;

  const LinearAttentionArguments& a;

  void Run(const Sequence& sequence, int64_t head, int64_t column) const {
    alignas(64) Floats memory[kLongestKey][kWide];
    const int64_t rows = RoundUp(a.key_size, kTogether), counts[kWide] = {Width(column), Width(column + kLanes)};
    for (int64_t row = 0; row < rows; ++row)
      for (int i = 0; i < kWide; ++i)
        memory[row][i] = sequence.fresh || row >= a.key_size
                             ? Floats{} : Some(Memory(sequence.before, head, row) + column + i * kLanes, counts[i]);
    for (int64_t token = sequence.first; token < sequence.first + sequence.count; ++token)
      Token(token, head, column, rows, counts, memory);
    for (int64_t row = 0; row < a.key_size; ++row)
      for (int i = 0; i < kWide; ++i)
        PutSome(memory[row][i], counts[i], Memory(sequence.after, head, row) + column + i * kLanes);
  }

  void Token(int64_t token, int64_t head, int64_t column, int64_t rows, const int64_t* counts,
             Floats (*memory)[kWide]) const {
    const int64_t at = (token * a.key_heads + head / (a.heads / a.key_heads)) * a.key_size;
    alignas(64) float query[kLongestKey], key[kLongestKey];
    Scaled(a.q + at, rows, 1 / __builtin_sqrtf(static_cast<float>(a.key_size)), query);
    Scaled(a.k + at, rows, 1, key);
    const float fade = Exp(Floats{} + a.decay[token * a.heads + head])[0], beta = a.beta[token * a.heads + head];

    Floats sums[kTogether][kWide] = {};
    for (int64_t row = 0; kDelta && row < rows; row += kTogether)
      UNROLL for (int j = 0; j < kTogether; ++j)
        UNROLL for (int i = 0; i < kWide; ++i) sums[j][i] += memory[row + j][i] * key[row + j];
    Floats added[kWide], read[kTogether][kWide] = {};
    for (int i = 0; i < kWide; ++i) {
      const Floats found = (sums[0][i] + sums[1][i]) + (sums[2][i] + sums[3][i]);
      const Floats value = Some(a.v + (token * a.heads + head) * a.value_size + column + i * kLanes, counts[i]);
      added[i] = (kDelta ? value - found * fade : value) * beta;
    }
    for (int64_t row = 0; row < rows; row += kTogether)
      UNROLL for (int j = 0; j < kTogether; ++j)
        UNROLL for (int i = 0; i < kWide; ++i) {
          const Floats now = memory[row + j][i] * fade + added[i] * key[row + j];
          memory[row + j][i] = now;
          read[j][i] += now * query[row + j];
        }
    for (int i = 0; i < kWide; ++i) {
      const Floats y = (read[0][i] + read[1][i]) + (read[2][i] + read[3][i]);
      PutSome(y, counts[i], a.y + (token * a.heads + head) * a.value_size + column + i * kLanes);
    }
  }

  // Scales a query or a key to a length if that is the rule, and fills it up with zeros.
  void Scaled(const float* x, int64_t rows, float length, float* to) const {
    Floats squares = {};
    for (int64_t i = 0; kDelta && i < a.key_size; i += kLanes) {
      const Floats some = Some(x + i, a.key_size - i);
      squares += some * some;
    }
    const float factor = kDelta ? length / __builtin_sqrtf(Total(squares) + kDeltaEps) : 1;
    for (int64_t i = 0; i < a.key_size; ++i) to[i] = x[i] * factor;
    for (int64_t i = a.key_size; i < rows; ++i) to[i] = 0;
  }

  int64_t Width(int64_t column) const { return column < a.value_size ? Least(a.value_size - column, kLanes) : 0; }

  float* Memory(int64_t place, int64_t head, int64_t row) const {
    return a.memory + ((place * a.heads + head) * a.key_size + row) * a.value_size;
  }
};

template <typename Number>
void Convolve(const ConvolutionArguments& a, const Pool& pool) {
  const int64_t width = kColumns * kLanes, blocks = (a.features + width - 1) / width;
  ForEach(pool, a.step.sequences * blocks, [&](int64_t piece) {
    const Sequence sequence(a.step, piece / blocks);
    if (sequence.count > 0) Convolution<Number>{a}.Run(sequence, piece % blocks * width);
  });
}

template <bool kDelta>
void Attend(const LinearAttentionArguments& a, const Pool& pool) {
  using Heads = LinearAttention<kDelta>;
  ClearOthers(a.step, a.heads * a.value_size, a.y);
  const int64_t blocks = (a.value_size + Heads::kBlock - 1) / Heads::kBlock, pieces = a.heads * blocks;
  ForEach(pool, a.step.sequences * pieces, [&](int64_t piece) {
    const Sequence sequence(a.step, piece / pieces);
    const int64_t part = piece % pieces;
    if (sequence.count > 0) Heads{a}.Run(sequence, part / blocks, part % blocks * Heads::kBlock);
  });
}

}  // namespace

void ShortConvolution(const ConvolutionArguments& a, const Pool& pool) {
  ClearOthers(a.step, a.features, a.y);
  if (a.type == Type::kF32) return Convolve<float>(a, pool);
  if (a.type == Type::kF16) return Convolve<Float16>(a, pool);
  Convolve<BFloat16>(a, pool);
}

void GatedDeltaRule(const LinearAttentionArguments& a, const Pool& pool) { Attend<true>(a, pool); }

void SelectiveScan(const LinearAttentionArguments& a, const Pool& pool) { Attend<false>(a, pool); }

}  // namespace neuronx::NEURONX_LEVEL
