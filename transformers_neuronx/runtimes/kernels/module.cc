// The kernels' interface to XLA and Python: handlers of custom calls, and the choice of an instruction-set level.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels.h"
#include "levels.h"
#include "parallel.h"
#include "xla/ffi/api/ffi.h"

namespace neuronx {
namespace {

namespace ffi = xla::ffi;

std::atomic<const Kernels*> level{nullptr};  // set before the first call of a kernel

// Calls of a kernel since the library was loaded, and how long they took.
struct Spent {
  const char* name;
  std::atomic<int64_t> calls{0}, nanoseconds{0};
};
Spent linear_spent{"linear"}, attention_spent{"attention"}, memory_spent{"attend_to"}, sample_spent{"sample"},
    norm_spent{"norm"};

class Counted {
 public:
  explicit Counted(Spent& spent) : spent_(spent), began_(Clock::now()) {}
  ~Counted() {
    spent_.calls.fetch_add(1, std::memory_order_relaxed);
    const auto took = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - began_).count();
    spent_.nanoseconds.fetch_add(took, std::memory_order_relaxed);
  }

 private:
  using Clock = std::chrono::steady_clock;
  Spent& spent_;
  Clock::time_point began_;
};

Pool PoolOf(ffi::ThreadPool& threads) {
  const auto run = [](void* pool, int64_t pieces, void (*body)(void*, int64_t), void* context) {
    Parallel(*static_cast<ffi::ThreadPool*>(pool), pieces, [&](int64_t piece) { body(context, piece); });
  };
  return {run, &threads};
}

// Memory of a thread, kept for its next call.
void* Scratch(int64_t bytes) {
  thread_local std::unique_ptr<char[]> memory;
  thread_local int64_t size = 0;
  if (size < bytes) {
    memory.reset(new char[bytes + 64]);
    size = bytes;
  }
  const auto address = reinterpret_cast<uintptr_t>(memory.get());
  return reinterpret_cast<void*>((address + 63) / 64 * 64);
}

ffi::ErrorOr<Type> TypeOf(ffi::DataType type) {
  switch (type) {
    case ffi::F32: return Type::kF32;
    case ffi::BF16: return Type::kBF16;
    case ffi::F16: return Type::kF16;
    case ffi::S8: return Type::kS8;
    case ffi::U8: return Type::kS4;
    default: return ffi::Unexpected(ffi::Error::InvalidArgument("a type that has no kernel"));
  }
}

ffi::ErrorOr<Activation> ActivationOf(std::string_view name) {
  constexpr std::pair<std::string_view, Activation> all[] = {
      {"", Activation::kNone}, {"gelu", Activation::kGelu}, {"gelu_fast", Activation::kGeluTanh},
      {"gelu_new", Activation::kGeluTanh}, {"gelu_pytorch_tanh", Activation::kGeluTanh}, {"relu", Activation::kRelu},
      {"silu", Activation::kSilu}, {"swish", Activation::kSilu}, {"tanh", Activation::kTanh}};
  for (const auto& [known, activation] : all)
    if (name == known) return activation;
  return ffi::Unexpected(ffi::Error::InvalidArgument("an activation that the kernel does not have"));
}

// Operands: x; for each part its weight, its scale if there is one, its bias if there is one; the residual, if any.
ffi::Error Linear(ffi::ThreadPool threads, ffi::AnyBuffer x, ffi::RemainingArgs operands, ffi::RemainingRets results,
                  int64_t parts, int64_t scaled, int64_t biased, int64_t rounded, std::string_view activation,
                  int64_t residual) {
  const Counted counted(linear_spent);
  const auto operand = [&](int64_t i) { return *operands.get<ffi::AnyBuffer>(i); };
  const auto result = [&](int64_t i) { return *results.get<ffi::AnyBuffer>(i); };
  const auto x_type = TypeOf(x.element_type()), weight_type = TypeOf(operand(0).element_type());
  const auto y_type = TypeOf(result(0)->element_type());
  const auto known = ActivationOf(activation);
  if (x_type.has_error()) return x_type.error();
  if (weight_type.has_error()) return weight_type.error();
  if (y_type.has_error()) return y_type.error();
  if (known.has_error()) return known.error();
  const int64_t inputs = x.dimensions().back(), rows = static_cast<int64_t>(x.element_count()) / inputs;
  LinearArguments arguments = {rows, inputs, 0, rounded, *x_type, *weight_type, *y_type, *known, static_cast<int>(parts),
                               x.untyped_data(), {}, nullptr, nullptr};
  int64_t next = 0;
  for (int64_t part = 0; part < parts; ++part) {
    Weight& weight = arguments.weights[part];
    auto y = result(arguments.Gated() ? 0 : part);
    weight = {y->dimensions().back(), operand(next++).untyped_data(), nullptr, nullptr, y->untyped_data()};
    if (scaled) {
      const auto scale = operand(next++);
      weight.scale = scale.untyped_data();
      if (scale.dimensions().size() > 1) arguments.group = inputs / scale.dimensions()[1];
    }
    if (biased) weight.bias = operand(next++).untyped_data();
  }
  if (residual) arguments.residual = operand(next).untyped_data();
  arguments.scratch = Scratch(level.load(std::memory_order_relaxed)->linear_scratch(arguments));
  level.load(std::memory_order_relaxed)->linear(arguments, PoolOf(threads));
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(LinearHandler, Linear,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int64_t>("parts")
                                  .Attr<int64_t>("scaled")
                                  .Attr<int64_t>("biased")
                                  .Attr<int64_t>("rounded")
                                  .Attr<std::string_view>("activation")
                                  .Attr<int64_t>("residual"));

// Operands and attributes are those of the composite: q, k and v; where rows stand; the cache, which is returned in the
// memory of the old one; slopes and biases.
ffi::Error AttentionOver(ffi::ThreadPool& threads, ffi::RemainingArgs operands, ffi::RemainingRets results,
                         ffi::Dictionary attributes, int64_t stands, bool paged) {
  const Counted counted(attention_spent);
  const auto operand = [&](size_t i) { return *operands.get<ffi::AnyBuffer>(i); };
  const auto result = [&](size_t i) { return *results.get<ffi::AnyBuffer>(i); };
  const auto number = [&](const char* name) { return *attributes.get<int64_t>(name); };
  const int64_t arrays = number("arrays"), cached_at = 3 + stands;
  const auto q = operand(0).dimensions(), k = operand(1).dimensions(), cache = operand(cached_at).dimensions();
  const auto type = TypeOf(operand(0).element_type()), cached = TypeOf(operand(cached_at).element_type());
  if (type.has_error()) return type.error();
  if (cached.has_error()) return cached.error();
  const auto s32 = [&](size_t i) { return static_cast<const int32_t*>(operand(i).untyped_data()); };
  const auto after = [&](int64_t i) { return i < arrays ? result(1 + i)->untyped_data() : nullptr; };
  int64_t next = cached_at + arrays;
  const auto given = [&](const char* name) { return number(name) ? operand(next++).untyped_data() : nullptr; };
  const void *slots = given("own_slots"), *slopes = given("alibi"), *biases = given("distances");
  AttentionArguments arguments = {
      q[0], q[1], q[2], k[2], q[3], cache[0] / k[2], cache[1], 1, 1, number("window"),
      biases ? operand(next - 1).dimensions()[1] : 0,
      *attributes.get<float>("scale"), *attributes.get<float>("softcap"), *type, *cached,
      operand(0).untyped_data(), operand(1).untyped_data(), operand(2).untyped_data(), s32(3), s32(4), nullptr,
      static_cast<const int32_t*>(slots), nullptr, static_cast<const float*>(slopes), static_cast<const float*>(biases),
      after(0), after(1), static_cast<float*>(after(2)), static_cast<float*>(after(3)), result(0)->untyped_data()};
  if (paged) {
    const auto rows = operand(3).dimensions();
    arguments.rows = rows[0];
    arguments.tokens = q[0] * q[1];
    arguments.stride = rows[1];
    arguments.most = rows[1] - kRowColumns;
    arguments.first = s32(3);
    arguments.length = s32(3) + 1;
    arguments.start = s32(3) + 2;
    arguments.prompt = s32(3) + 3;
    arguments.table = s32(3) + kRowColumns;
    const bool power = (arguments.page & (arguments.page - 1)) == 0;
    if (arguments.most < 1 || (arguments.most > 1 && (!power || arguments.page % kPage)))
      return ffi::Error::InvalidArgument("paged_attention: pages must be a power of two of at least 16 positions");
  }
  level.load(std::memory_order_relaxed)->attention(arguments, PoolOf(threads));
  return ffi::Error::Success();
}

ffi::Error Attention(ffi::ThreadPool threads, ffi::RemainingArgs operands, ffi::RemainingRets results,
                     ffi::Dictionary attributes) {
  return AttentionOver(threads, operands, results, attributes, 2, false);
}

ffi::Error PagedAttention(ffi::ThreadPool threads, ffi::RemainingArgs operands, ffi::RemainingRets results,
                          ffi::Dictionary attributes) {
  return AttentionOver(threads, operands, results, attributes, 1, true);
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(AttentionHandler, Attention,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(PagedAttentionHandler, PagedAttention,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs());

// Operands are those of the composite. The bias is the last one, if there is one.
ffi::Error AttendTo(ffi::ThreadPool threads, ffi::AnyBuffer q, ffi::AnyBuffer keys, ffi::AnyBuffer values,
                    ffi::Buffer<ffi::S32> lengths, ffi::RemainingArgs more, ffi::Result<ffi::AnyBuffer> context,
                    float scale) {
  const Counted counted(memory_spent);
  const auto size = q.dimensions(), memory = keys.dimensions();
  const auto type = TypeOf(q.element_type());
  if (type.has_error()) return type.error();
  MemoryArguments arguments = {size[0], size[1], size[2], memory[2], size[3], memory[1], 0, 0, 0, 0, scale, *type,
                               q.untyped_data(), keys.untyped_data(), values.untyped_data(), lengths.typed_data(),
                               nullptr, context->untyped_data()};
  if (more.size() > 0) {
    const auto bias = *more.get<ffi::Buffer<ffi::F32>>(0);
    const auto axes = bias.dimensions();  // rows, heads, positions, tokens
    const int64_t of_head = axes[2] * axes[3];
    arguments.bias = bias.typed_data();
    arguments.bias_row = axes[0] > 1 ? axes[1] * of_head : 0;
    arguments.bias_head = axes[1] > 1 ? of_head : 0;
    arguments.bias_position = axes[3];
    arguments.bias_token = axes[3] > 1 ? 1 : 0;
  }
  level.load(std::memory_order_relaxed)->attend_to(arguments, PoolOf(threads));
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(AttendToHandler, AttendTo,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("scale"));

ffi::Error Sample(ffi::ThreadPool threads, ffi::Buffer<ffi::F32> logits, ffi::Buffer<ffi::PRED> seen,
                  ffi::Buffer<ffi::S32> policy, ffi::Buffer<ffi::S32> position, ffi::ResultBuffer<ffi::S32> token) {
  const Counted counted(sample_spent);
  const auto size = logits.dimensions();
  const Kernels& kernels = *level.load(std::memory_order_relaxed);
  SampleArguments arguments = {size[0],
                               size[1],
                               logits.typed_data(),
                               static_cast<const int8_t*>(seen.untyped_data()),
                               policy.typed_data(),
                               position.typed_data(),
                               token->typed_data(),
                               nullptr};
  arguments.scratch = Scratch(kernels.sample_scratch(arguments));
  kernels.sample(arguments, PoolOf(threads));
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(SampleHandler, Sample,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>());

ffi::Error Normalize(ffi::ThreadPool threads, ffi::AnyBuffer x, ffi::Buffer<ffi::F32> weight, const float* bias,
                     ffi::Result<ffi::AnyBuffer> y, float eps) {
  const Counted counted(norm_spent);
  const auto type = TypeOf(x.element_type());
  if (type.has_error()) return type.error();
  const int64_t size = x.dimensions().back(), rows = static_cast<int64_t>(x.element_count()) / size;
  level.load(std::memory_order_relaxed)->normalize({rows, size, eps, *type, x.untyped_data(), weight.typed_data(), bias, y->untyped_data()},
                   PoolOf(threads));
  return ffi::Error::Success();
}

ffi::Error LayerNorm(ffi::ThreadPool threads, ffi::AnyBuffer x, ffi::Buffer<ffi::F32> weight,
                     ffi::Buffer<ffi::F32> bias, ffi::Result<ffi::AnyBuffer> y, float eps) {
  return Normalize(threads, x, weight, bias.typed_data(), y, eps);
}

ffi::Error RmsNorm(ffi::ThreadPool threads, ffi::AnyBuffer x, ffi::Buffer<ffi::F32> weight,
                   ffi::Result<ffi::AnyBuffer> y, float eps) {
  return Normalize(threads, x, weight, nullptr, y, eps);
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(LayerNormHandler, LayerNorm,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("eps"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(RmsNormHandler, RmsNorm,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("eps"));

PyObject* Handlers(PyObject*, PyObject*) {
  const std::pair<const char*, XLA_FFI_Handler*> all[] = {
      {"linear", LinearHandler}, {"attention", AttentionHandler}, {"paged_attention", PagedAttentionHandler},
      {"attend_to", AttendToHandler}, {"sample", SampleHandler}, {"layer_norm", LayerNormHandler}, {"rms_norm", RmsNormHandler}};
  PyObject* handlers = PyDict_New();
  for (const auto& [name, handler] : all) {
    PyObject* capsule = PyCapsule_New(reinterpret_cast<void*>(handler), nullptr, nullptr);
    if (!handlers || !capsule || PyDict_SetItemString(handlers, name, capsule)) return nullptr;
    Py_DECREF(capsule);
  }
  return handlers;
}

PyObject* SpentSoFar(PyObject*, PyObject*) {
  PyObject* all = PyDict_New();
  for (const Spent* each : {&linear_spent, &attention_spent, &memory_spent, &sample_spent, &norm_spent}) {
    const double seconds = static_cast<double>(each->nanoseconds.load()) * 1e-9;
    PyObject* pair = Py_BuildValue("(Ld)", static_cast<long long>(each->calls.load()), seconds);
    if (!all || !pair || PyDict_SetItemString(all, each->name, pair)) return nullptr;
    Py_DECREF(pair);
  }
  return all;
}

PyObject* LevelNames(PyObject*, PyObject*) {
  const auto levels = Levels();
  PyObject* names = PyList_New(0);
  for (const Kernels* each : levels) {
    PyObject* name = PyUnicode_FromString(each->name);
    if (!name || PyList_Append(names, name)) return nullptr;
    Py_DECREF(name);
  }
  return names;
}

PyObject* SetLevel(PyObject*, PyObject* name) {
  const char* wanted = PyUnicode_AsUTF8(name);
  if (!wanted) return nullptr;
  for (const Kernels* each : Levels()) {
    if (std::strcmp(each->name, wanted) == 0) {
      level = each;
      Py_RETURN_NONE;
    }
  }
  PyErr_Format(PyExc_ValueError, "this processor has no instructions of the level %s", wanted);
  return nullptr;
}

PyMethodDef methods[] = {
    {"handlers", Handlers, METH_NOARGS, "A capsule for each kernel, by the name of the composite."},
    {"spent", SpentSoFar, METH_NOARGS, "Calls of each kernel so far, and the seconds that they took."},
    {"levels", LevelNames, METH_NOARGS, "The levels of instructions that this processor has, the best one last."},
    {"set_level", SetLevel, METH_O, "Use the instructions of a level from now on."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_kernels", "Kernels for the CPU.", -1, methods};

}  // namespace
}  // namespace neuronx

PyMODINIT_FUNC PyInit__kernels() { return PyModule_Create(&neuronx::definition); }
