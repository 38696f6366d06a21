// The kernels of an instruction-set level, and their arguments.
//
// Every level compiles the same sources with its own compiler flags. These sources therefore include nothing that could
// be compiled twice: a linker keeps only one of two equal functions, and an older processor may lack its instructions.
#pragma once

#include <cstdint>

namespace neuronx {

enum class Type { kF32, kBF16, kF16, kS8, kS4, kS5, kS6, kF8, kE2M1, kNF4, kFP4 };

// Runs body(context, piece) for every piece of [0, pieces) on several threads.
struct Pool {
  void (*run)(void* pool, int64_t pieces, void (*body)(void* context, int64_t piece), void* context);
  void* pool;
};

enum class Activation { kNone, kGelu, kGeluTanh, kRelu, kRelu2, kSilu, kTanh };

// One weight of a linear layer, and its result:
//   data     [outputs, inputs], in panels
//   scale    null; or f32[outputs] for s8 and f8; or [outputs, inputs / group] in panels
//   minimum  null; or as a scale of groups: what a group's smallest value stands for, which is -8 for s4, -16 for s5,
//            -32 for s6, and 0 for s8
//   scale_unit, minimum_unit  null; or [outputs, inputs / block] in panels: scales and minima are then s8, times these
//   bias     null; or [outputs], of the activations' type
//   y        [rows, outputs]
struct Weight {
  int64_t outputs;
  const void* data;
  const void* scale;
  const void* minimum;
  const void* scale_unit;
  const void* minimum_unit;
  const void* bias;
  void* y;
};

constexpr int kMostParts = 3;
constexpr int kPanel = 16;               // outputs of a panel
constexpr int64_t kLargestGroup = 4096;  // of inputs, so that their sums fit into 32 bits

// The product of x[rows, inputs] and each weight, plus the weight's bias:
//   group       inputs per scale of a weight, or 0 if a scale is for all inputs
//   block       inputs per unit of a weight's scales, whole groups, or 0 if they have none
//   rounded     inputs per scale of activations that are rounded to 8 bits, or 0; the same as a `group` of weights
//   activation  if there is one, there is one y: activation(first product), times the second product if there are two
//   residual    [rows, outputs] of y's type, added to a single y, or null
//   scratch     `linear_scratch(…)` bytes
//   first_row, first_piece  set by the kernel: the work of the products before, where several are computed together
struct LinearArguments {
  int64_t rows, inputs, group, block, rounded;
  Type x_type, weight_type, scale_type, y_type;  // minima have the type of scales; with units it is theirs
  Activation activation;
  int parts;
  const void* x;
  Weight weights[kMostParts];
  const void* residual;
  void* scratch;
  int64_t first_row, first_piece;

  bool Gated() const { return activation != Activation::kNone && parts > 1; }
  bool HasMinima() const { return weights[0].minimum; }
};

// Attention over the cache, after the new keys and values were written to it:
//   q, context        [tokens of all rows, heads, size]
//   k, v              [tokens of all rows, kv_heads, size], the new keys and values; without v, keys are values, too
//   keys, values      [pages * kv_heads, page, size], the cache, in pages of `page` positions; both the same without v
//   start, length     [rows]: row i has length[i] tokens, from position start[i] on
//   first             [rows]: the first token of each row, or null if each row has room for `tokens` tokens
//   table             [rows, most]: the pages of each row, or null if row i has page i
//   prompt            [rows]: whether a row's queries are computed together, or null to choose by their number. The sums
//                     of a query have another order then; its neighbours never matter
//   stride            numbers from a row to the next in these five
//   cached            the cache's type; with kS8, each position has a scale in key_scales and value_scales
//   type              the type of everything else
//   slopes            [heads] or null: a score falls by the slope for each position between query and key
//   biases            [heads, distances] or null: added to scores by distance; the last one is also for all larger ones
//   sinks             [heads] or null: the score of one more position, which has no value
//   window, softcap   0 if there is none; chunk, too: a query sees no position of an earlier chunk of so many
// If a row has several pages, `page` is a power of two and a multiple of kPage.
constexpr int64_t kPage = 16;
constexpr int64_t kLongestHead = 576;        // features: those of DeepSeek-V3's compressed keys
constexpr int64_t kMostBiases = 0x7fffffff;  // so that their offsets fit into 32 bits
constexpr int64_t kRowColumns = 4;  // of a packed row, before its pages: first, length, start, prompt

struct AttentionArguments {
  int64_t rows, tokens, heads, kv_heads, size, pages, page, most, stride, window, chunk, distances;
  float scale, softcap;
  Type type, cached;
  const void *q, *k, *v;
  const int32_t *start, *length, *first, *table, *prompt;
  const float *slopes, *biases, *sinks;
  void *keys, *values;
  float *key_scales, *value_scales;
  void* context;
};

// Attention to a memory:
//   q, context    [rows, tokens, heads, size]
//   keys, values  [memories, positions, kv_heads, size]
//   length        [memories]: of memory i, the first length[i] positions are seen
//   slots         [rows]: the memory of each row, the nearest one if there is none of this number, or null if row i has
//                 memory i
//   bias          added to scores, or null
//   bias_row, bias_head, bias_position, bias_token   the bias's strides, in numbers, or 0 where one is shared
struct MemoryArguments {
  int64_t rows, tokens, heads, kv_heads, size, memories, positions, bias_row, bias_head, bias_position, bias_token;
  float scale;
  Type type;
  const void *q, *keys, *values;
  const int32_t *length, *slots;
  const float* bias;
  void* context;
};

// Sampling of a token for each row:
//   logits, seen  [rows, vocabulary]
//   policy        [rows, kPolicyColumns]: top_k; the bits of temperature, top_p, min_p and the penalty of tokens that were
//                 seen; two words of a random key
//   position      [rows]: of the token
//   token         [rows], the result; negative if the logits are no distribution
constexpr int64_t kPolicyColumns = 7;

struct SampleArguments {
  int64_t rows, vocabulary;
  const float* logits;
  const int8_t* seen;
  const int32_t *policy, *position;
  int32_t* token;
  void* scratch;
};

// Normalization of x[rows, size] to y:
//   with bias[size]  layer norm: (x - mean) / deviation * weight + bias
//   without          RMS norm: x / root of the mean square * weight
//   weight           [size]
struct NormArguments {
  int64_t rows, size;
  float eps;
  Type type;
  const void* x;
  const float *weight, *bias;
  void* y;
};

// What low-rank adapters add to results y[rows, outputs] of a linear layer, in place: x aᵀ b, with a and b of one adapter:
//   x        [rows, inputs]
//   a, b     [adapters * rank, inputs], [adapters * rank, outputs], of x's type
//   adapter  [rows / together]: the adapter of so many adjacent rows; there is none if it is negative or too large
//   scratch  `lora_scratch(…)` bytes
struct LoraArguments {
  int64_t rows, together, inputs, outputs, adapters, rank;
  Type x_type, y_type;
  const void *x, *a, *b;
  const int32_t* adapter;
  void* y;
  void* scratch;
};

// The sequences of a step, for layers that keep states of them in so many `places`:
//   table   [sequences, kSequenceColumns]: the first token of each among those of the step, the number of its tokens, the
//           position of the first one, and the places of its states, before the step and after it
constexpr int64_t kSequenceColumns = 5;

struct StepArguments {
  int64_t sequences, tokens, places;
  const int32_t* table;
};

// A convolution of each feature over `size` tokens, with an activation of the sums:
//   x, y    [tokens, features]
//   weight  [size, features], the last one for the token itself
//   state   [places, size - 1, features], the inputs of the tokens before
//   bias    [features] of the sums, or none
constexpr int64_t kMostTaps = 16;  // of a convolution

struct ConvolutionArguments {
  StepArguments step;
  int64_t features, size;
  Type type;  // of x
  Activation activation;
  const void* x;
  const float *weight, *bias;
  float *state, *y;
};

// Linear attention by the gated delta rule, or by Mamba-2's selective scan:
//   q, k         [tokens, key_heads, key_size], which the delta rule scales
//   v, y         [tokens, heads, value_size]
//   decay, beta  [tokens, heads]
//   memory       [places, heads, key_size, value_size]
constexpr int64_t kLongestKey = 256;  // features
constexpr float kDeltaEps = 1e-6f;

struct LinearAttentionArguments {
  StepArguments step;
  int64_t key_heads, heads, key_size, value_size;
  const float *q, *k, *v, *decay, *beta;
  float *memory, *y;
};

struct Kernels {
  const char* name;
  int64_t (*linear_scratch)(const LinearArguments&);  // bytes
  void (*linear)(LinearArguments* products, int64_t count, const Pool&);  // they do not depend on each other
  void (*attention)(const AttentionArguments&, const Pool&);
  void (*attend_to)(const MemoryArguments&, const Pool&);
  int64_t (*sample_scratch)(const SampleArguments&);  // bytes
  void (*sample)(const SampleArguments&, const Pool&);
  void (*normalize)(const NormArguments&, const Pool&);
  int64_t (*lora_scratch)(const LoraArguments&);  // bytes
  void (*add_adapters)(const LoraArguments&, const Pool&);
  void (*short_convolution)(const ConvolutionArguments&, const Pool&);
  void (*gated_delta_rule)(const LinearAttentionArguments&, const Pool&);
  void (*selective_scan)(const LinearAttentionArguments&, const Pool&);
};

namespace portable { extern const Kernels kernels; }
#ifdef __x86_64__
namespace avx2 { extern const Kernels kernels; }
namespace avx512 { extern const Kernels kernels; }
namespace avx512_bf16 { extern const Kernels kernels; }
namespace amx { extern const Kernels kernels; }
#elif defined(__aarch64__)
namespace neon_dot { extern const Kernels kernels; }
namespace neon_bf16 { extern const Kernels kernels; }
#endif

}  // namespace neuronx
