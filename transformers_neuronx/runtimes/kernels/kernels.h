// What a level of instructions offers. Every level compiles the same sources with its own compiler flags, so these
// sources include nothing that could be compiled twice: a linker keeps one of two equal functions, whose instructions
// an older processor may lack.
#pragma once

#include <cstdint>

namespace neuronx {

enum class Type { kF32, kBF16, kF16, kS8, kS4 };

// Runs body(context, piece) for every piece of [0, pieces), on several threads.
struct Pool {
  void (*run)(void* pool, int64_t pieces, void (*body)(void* context, int64_t piece), void* context);
  void* pool;
};

enum class Activation { kNone, kGelu, kGeluTanh, kRelu, kSilu, kTanh };

// data, a matrix [outputs, inputs] in panels, times scale where there is one: f32[outputs] of s8, or, likewise in panels,
// [outputs, inputs / group], f32 of s8 and bf16 of s4; and bias[outputs] of the activations' type, or none.
// Where `rounded` is not 0, activations are rounded to 8 bits, so many inputs with a scale of their own; these are the
// groups of weights that have some. -> y[rows, outputs]
struct Weight {
  int64_t outputs;
  const void* data;
  const void* scale;
  const void* bias;
  void* y;
};

constexpr int kMostParts = 3;

// Each y is the product of x[rows, inputs] and its weight, plus the bias. With an activation there is one y: that of the
// first weight's product, times the second's where there are two. A single y may have a residual[rows, outputs] of its
// type added. `scratch` has room for `linear_scratch(…)`.
struct LinearArguments {
  int64_t rows, inputs, group, rounded;
  Type x_type, weight_type, y_type;
  Activation activation;
  int parts;
  const void* x;
  Weight weights[kMostParts];
  const void* residual;  // or null
  void* scratch;

  bool Gated() const { return activation != Activation::kNone && parts > 1; }
};

// q[rows, tokens, heads, size] looks at keys and values [slots * kv_heads, positions, size], after k and v[rows, tokens,
// kv_heads, size] were written there: of row i `length[i]` tokens from position `start[i]` on, in slot `slot[i]`, or i.
// -> context, like q. In `cached`, if it is kS8, each position has a scale; `type` is that of all else. Scores fall by a
// slope for each position in between, and a bias is added that goes by how many there are, the last for more as well.
struct AttentionArguments {
  int64_t rows, tokens, heads, kv_heads, size, slots, positions, window, distances;
  float scale, softcap;  // a window or a softcap of 0 is none
  Type type, cached;
  const void *q, *k, *v;
  const int32_t *start, *length, *slot;
  const float *slopes, *biases;  // of heads, and [heads, distances], or null
  void *keys, *values;
  float *key_scales, *value_scales;
  void* context;
};

// q[rows, tokens, heads, size] looks at keys and values[rows, positions, kv_heads, size], of row i at the first
// `length[i]`. -> context, like q. Scores have a bias added, where there is one; from one row, head, position and token to
// the next it is so many numbers further on, or none where they share it.
struct MemoryArguments {
  int64_t rows, tokens, heads, kv_heads, size, positions, bias_row, bias_head, bias_position, bias_token;
  float scale;
  Type type;
  const void *q, *keys, *values;
  const int32_t* length;
  const float* bias;  // or null
  void* context;
};

// Of logits[rows, vocabulary], penalized where a token was seen, the largest's place; below 0 what is no distribution.
struct LikeliestArguments {
  int64_t rows, vocabulary;
  const float* logits;
  const int8_t* seen;
  const float* penalty;  // of rows
  int32_t* token;
};

// x[rows, size] -> y: less its mean and divided by its deviation, where there is a bias; otherwise divided by the root of
// the mean of its squares. Then times weight[size], plus bias[size].
struct NormArguments {
  int64_t rows, size;
  float eps;
  Type type;
  const void* x;
  const float *weight, *bias;
  void* y;
};

struct Kernels {
  const char* name;
  int64_t (*linear_scratch)(const LinearArguments&);  // bytes
  void (*linear)(const LinearArguments&, const Pool&);
  void (*attention)(const AttentionArguments&, const Pool&);
  void (*attend_to)(const MemoryArguments&, const Pool&);
  void (*likeliest)(const LikeliestArguments&, const Pool&);
  void (*normalize)(const NormArguments&, const Pool&);
};

namespace portable { extern const Kernels kernels; }
#ifdef __x86_64__
namespace avx2 { extern const Kernels kernels; }
namespace avx512 { extern const Kernels kernels; }
namespace avx512_bf16 { extern const Kernels kernels; }
namespace amx { extern const Kernels kernels; }
#endif

}  // namespace neuronx
