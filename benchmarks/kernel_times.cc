// The kernels of one level and one commit as functions that Python can call. See kernel_times.py.
#include "kernels.h"

namespace neuronx::NEURONX_LEVEL {
int64_t LinearScratch(const LinearArguments&);
void Linear(LinearArguments*, int64_t, const Pool&);
void Attend(const AttentionArguments&, const Pool&);
void AttendTo(const MemoryArguments&, const Pool&);
}  // namespace neuronx::NEURONX_LEVEL

using namespace neuronx;
using namespace neuronx::NEURONX_LEVEL;

namespace {

const Pool kAlone{[](void*, int64_t pieces, void (*body)(void*, int64_t), void* context) {
                    for (int64_t i = 0; i < pieces; ++i) body(context, i);
                  },
                  nullptr};

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// y = x[rows, inputs] times the weights, which have scales for outputs or for groups. If `y` is null, returns the bytes
// that `scratch` needs.
int64_t linear(int64_t rows, int64_t inputs, int64_t outputs, int64_t group, int64_t rounded, int type, int weight_type,
               const void* x, const void* weights, const void* scale, void* scratch, void* y) {
  LinearArguments a = {};
  a.rows = rows, a.inputs = inputs, a.group = group, a.rounded = rounded;
  a.x_type = a.y_type = static_cast<Type>(type), a.weight_type = static_cast<Type>(weight_type);
  a.scale_type = a.weight_type == Type::kS4 ? Type::kBF16 : Type::kF32, a.activation = Activation::kNone, a.parts = 1;
  a.x = x, a.scratch = scratch;
  a.weights[0].outputs = outputs, a.weights[0].data = weights, a.weights[0].scale = scale, a.weights[0].y = y;
  if (!y) return LinearScratch(a);
  Linear(&a, 1, kAlone);
  return 0;
}

// Attention of a token of each row, at a position, to a cache in pages of 64 positions. `table` has the row's pages, with
// kRowColumns before them.
void attend(int64_t rows, int64_t heads, int64_t kv_heads, int64_t size, int64_t pages, int64_t most, int type,
            const int32_t* table, const void* q, const void* k, const void* v, void* keys, void* values,
            void* context) {
  AttentionArguments a = {};
  a.rows = a.tokens = rows, a.heads = heads, a.kv_heads = kv_heads, a.size = size, a.pages = pages, a.page = 64;
  a.most = most, a.stride = kRowColumns + most, a.scale = 0.125f, a.type = a.cached = static_cast<Type>(type);
  a.q = q, a.k = k, a.v = v, a.keys = keys, a.values = values, a.context = context;
  a.first = table, a.length = table + 1, a.start = table + 2, a.prompt = table + 3, a.table = table + kRowColumns;
  Attend(a, kAlone);
}

// Attention of q to keys and values [tokens, heads, size], with a bias for each position.
void attend_to(int64_t tokens, int64_t heads, int64_t size, int type, const void* q, const void* keys,
               const void* values, const float* bias, void* context) {
  const auto length = static_cast<int32_t>(tokens);
  MemoryArguments a = {};
  a.rows = 1, a.tokens = a.positions = tokens, a.heads = a.kv_heads = heads, a.size = size, a.scale = 0.125f;
  a.type = static_cast<Type>(type), a.q = q, a.keys = keys, a.values = values, a.length = &length;
  a.bias = bias, a.bias_position = 1, a.context = context;
  AttendTo(a, kAlone);
}

}
