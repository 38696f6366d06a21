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

// y[rows, outputs] f32 = x[rows, inputs] times weight[outputs, inputs], and times scale where there is one: f32[outputs]
// of weights in s8, f32[outputs, inputs / group] of those in s4. `scratch` has room for `scratch_bytes(…)`.
struct LinearArguments {
  int64_t rows, inputs, outputs, group;
  Type x_type, weight_type;
  const void* x;
  const void* weight;
  const float* scale;
  float* y;
  void* scratch;
};

// q[rows, tokens, heads, size] looks at keys and values [slots * kv_heads, positions, size], after k and v[rows, tokens,
// kv_heads, size] were written there: of row i `length[i]` tokens from position `start[i]` on, in slot `slot[i]`, or i.
// -> context, like q. In `cached`, if it is kS8, each position has a scale; `type` is that of all else.
struct AttentionArguments {
  int64_t rows, tokens, heads, kv_heads, size, slots, positions, window;
  float scale, softcap;  // a window or a softcap of 0 is none
  Type type, cached;
  const void *q, *k, *v;
  const int32_t *start, *length, *slot;
  const float* slopes;  // of heads, or null
  void *keys, *values;
  float *key_scales, *value_scales;
  void* context;
};

struct Kernels {
  const char* name;
  int64_t (*linear_scratch)(const LinearArguments&);  // bytes
  void (*linear)(const LinearArguments&, const Pool&);
  void (*attention)(const AttentionArguments&, const Pool&);
};

namespace portable { extern const Kernels kernels; }
#ifdef __x86_64__
namespace avx2 { extern const Kernels kernels; }
namespace avx512 { extern const Kernels kernels; }
namespace avx512_bf16 { extern const Kernels kernels; }
#endif

}  // namespace neuronx
