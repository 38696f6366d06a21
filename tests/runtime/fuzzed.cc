// Random calls of the handlers, written as XLA writes them: for AddressSanitizer and UndefinedBehaviorSanitizer.
//
//   fuzzed KERNEL CALLS [SEED]
//
// Sizes, types, attributes and contents of arrays are random. Half of the calls are whole but for their contents, which
// may be anything; the others are damaged as well. Each has to be computed or refused, within memory of just its size.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "handlers.h"
#include "levels.h"
#include "threads.h"
#include "xla/ffi/api/ffi.h"

struct XLA_FFI_Error { std::string message; };

namespace neuronx {
namespace {

namespace ffi = xla::ffi;
using Sizes = std::vector<int64_t>;

std::mt19937_64 random_bits;

int64_t Below(int64_t limit) { return static_cast<int64_t>(random_bits() % static_cast<uint64_t>(limit)); }
int64_t UpTo(int64_t limit) { return 1 + Below(limit); }
bool Sometimes(int64_t every = 2) { return Below(every) == 0; }

template <typename Value>
Value OneOf(std::initializer_list<Value> values) { return values.begin()[Below(values.size())]; }

ffi::DataType Float() { return OneOf({ffi::F32, ffi::BF16, ffi::F16}); }

// Numbers that a kernel may not expect.
int64_t Odd() {
  return OneOf<int64_t>({-1, 0, 1, 2, 7, 64, std::numeric_limits<int32_t>::max(), std::numeric_limits<int32_t>::min(),
                         std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::min(),
                         static_cast<int64_t>(random_bits())});
}

struct Array {
  std::string name;
  ffi::DataType type;
  Sizes sizes;
  std::vector<int32_t> whole;  // contents of s32, if they are not random
  int memory = -1;             // of a result: the operand in whose memory it is

  int64_t Count() const {
    int64_t count = 1;
    for (const int64_t size : sizes) count *= size;
    return count;
  }
};

struct Attribute {
  XLA_FFI_AttrType kind = XLA_FFI_AttrType_SCALAR;
  ffi::DataType type = ffi::S64;
  int64_t whole = 0;
  float real = 0;
  std::string text;
  std::vector<int64_t> many;
};

// A call before it is made.
struct Drawn {
  std::vector<Array> operands, results;
  std::map<std::string, Attribute> attributes;  // in the order of names, as XLA has them

  int Operand(const std::string& name, ffi::DataType type, Sizes sizes, std::vector<int32_t> whole = {}) {
    operands.push_back({name, type, std::move(sizes), std::move(whole)});
    return static_cast<int>(operands.size()) - 1;
  }
  void Result(ffi::DataType type, Sizes sizes) { results.push_back({"", type, std::move(sizes), {}}); }
  void Updated(int operand) {
    results.push_back({"", operands[operand].type, operands[operand].sizes, {}, operand});
  }
  void Whole(const std::string& name, int64_t value) { attributes[name].whole = value; }
  void Real(const std::string& name, float value) {
    attributes[name].type = ffi::F32;
    attributes[name].real = value;
  }
  void Many(const std::string& name, std::vector<int64_t> values) {
    attributes[name].kind = XLA_FFI_AttrType_ARRAY;
    attributes[name].many = std::move(values);
  }
  void Text(const std::string& name, std::string value) {
    attributes[name].kind = XLA_FFI_AttrType_STRING;
    attributes[name].text = std::move(value);
  }
};

std::vector<int32_t> Numbers(int64_t count, int64_t limit) {
  std::vector<int32_t> numbers(count);
  for (auto& each : numbers) each = static_cast<int32_t>(Below(limit));
  return numbers;
}

std::string AnyActivation() {
  return OneOf<const char*>({"", "gelu", "gelu_new", "relu", "relu2", "silu", "tanh"});
}

Drawn Linear() {
  Drawn call;
  const ffi::DataType x = Float(), stored = OneOf({x, ffi::S8, ffi::U8, ffi::F8E4M3FN}), y = Sometimes() ? x : ffi::F32;
  const bool floats = stored == x, experts = Sometimes(3), codes = stored == ffi::U8 && Sometimes(3);
  const bool whole = (stored == ffi::S8 || stored == ffi::U8) && !codes;
  const bool grouped = stored == ffi::U8 || (!floats && Sometimes());
  const bool minima = grouped && whole && Sometimes(), levels = grouped && whole && Sometimes();
  const int64_t bits = codes || Sometimes() ? 4 : OneOf<int64_t>({5, 6});
  const int64_t group = bits == 5 || Sometimes() ? OneOf<int64_t>({32, 64, 96}) : 16, blocks = UpTo(2), groups = blocks * UpTo(2);
  const int64_t inputs = grouped ? groups * group : UpTo(80), count = UpTo(4);
  const int64_t rows = UpTo(Sometimes(4) ? 40 : 9);  // AMX has tiles for many rows
  const int64_t word = floats ? (x == ffi::BF16 ? 2 : 1) : 4;
  const int64_t words = stored == ffi::U8 ? inputs * bits / 32 : (inputs + word - 1) / word;
  const int parts = static_cast<int>(UpTo(3));
  const std::string activation = parts < 3 ? AnyActivation() : "";
  const ffi::DataType scales = levels ? ffi::S8 : Float(), units = Float();
  const auto in = [&](Sizes sizes) {
    if (experts) sizes.insert(sizes.begin(), count);
    return sizes;
  };
  const bool in_rows = !experts && Sometimes(4);
  call.Operand("x", x, in_rows ? Sizes{1, rows, inputs} : Sizes{rows, inputs});
  if (experts) call.Operand("experts", ffi::S32, {rows}, Numbers(rows, count));
  int64_t outputs = UpTo(40);
  for (int part = 0; part < parts; ++part) {
    const std::string name = "parts." + std::to_string(part);
    if (activation.empty()) outputs = UpTo(40);
    const int64_t panels = (outputs + kPanel - 1) / kPanel;
    call.Operand(name + ".weight", stored, in({panels, words, kPanel, word}));
    if (!floats && grouped) call.Operand(name + ".scale", scales, in({panels, groups, kPanel, 1}));
    if (!floats && !grouped) call.Operand(name + ".scale", ffi::F32, in({outputs}));
    if (minima) call.Operand(name + ".minimum", scales, in({panels, groups, kPanel, 1}));
    if (levels) call.Operand(name + ".scale_unit", units, in({panels, blocks, kPanel, 1}));
    if (levels && minima) call.Operand(name + ".minimum_unit", units, in({panels, blocks, kPanel, 1}));
    if (Sometimes()) call.Operand(name + ".bias", x, in({outputs}));
    if (part == 0 || activation.empty())
      call.Result(y, in_rows ? Sizes{1, rows, outputs} : Sizes{rows, outputs});
  }
  if (!experts && (parts == 1 || !activation.empty()) && Sometimes()) call.Operand("residual", y, call.results[0].sizes);
  call.Text("activation", activation);
  call.Text("codes", codes ? OneOf<const char*>({"e2m1", "nf4", "fp4"}) : "");
  call.Whole("rounded", whole && Sometimes() ? (grouped ? group : 32) : 0);
  return call;
}

// New keys and values, and arrays of the cache.
void Cached(Drawn& call, ffi::DataType type, bool values, int64_t blocks, int64_t page, int64_t size,
            const std::vector<Array>& between) {
  const ffi::DataType cached = Sometimes(3) ? ffi::S8 : type;
  const int parts = values ? 2 : 1;
  for (const Array& array : between) call.operands.push_back(array);
  const auto first = static_cast<int>(call.operands.size());
  for (int i = 0; i < parts; ++i) call.Operand("cache." + std::to_string(i), cached, {blocks, page, size});
  for (int i = parts; i < 2 * parts && cached == ffi::S8; ++i)
    call.Operand("cache." + std::to_string(i), ffi::F32, {blocks, page, 1});
  for (int i = first; i < static_cast<int>(call.operands.size()); ++i) call.Updated(i);
}

Drawn AttentionOver(bool paged) {
  Drawn call;
  const ffi::DataType type = Float();
  const int64_t rows = UpTo(3), tokens = UpTo(OneOf<int64_t>({1, 4, 12})), kv_heads = UpTo(2), size = UpTo(40);
  const int64_t heads = kv_heads * UpTo(4), total = rows * tokens, pages = UpTo(6);
  const int64_t page = paged ? kPage << Below(2) : UpTo(70), sequences = UpTo(4), most = UpTo(3);
  const bool values = !Sometimes(4);
  call.Operand("q", type, {rows, tokens, heads, size});
  call.Operand("k", type, {rows, tokens, kv_heads, size});
  if (values) call.Operand("v", type, {rows, tokens, kv_heads, size});
  call.Result(type, {rows, tokens, heads, size});
  std::vector<Array> places;
  if (paged) {
    std::vector<int32_t> segments;
    int64_t token = 0;
    for (int64_t i = 0; i < sequences; ++i) {
      const int64_t length = std::min(UpTo(6), total - token), start = Below(std::max<int64_t>(most * page - length, 1));
      for (const int64_t each : {token, length, start, Below(2)}) segments.push_back(static_cast<int32_t>(each));
      for (const int32_t each : Numbers(most, pages)) segments.push_back(each);
      token += length;
    }
    places.push_back({"segments", ffi::S32, {sequences, kRowColumns + most}, segments});
  } else {
    std::vector<int32_t> length = Numbers(rows, tokens + 1), start = Numbers(rows, std::max<int64_t>(page - tokens, 1));
    places.push_back({"start", ffi::S32, {rows}, start});
    places.push_back({"length", ffi::S32, {rows}, length});
  }
  const bool slots = !paged && Sometimes();
  Cached(call, type, values, kv_heads * (slots || paged ? std::max(pages, rows) : rows), page, size, places);
  if (slots) call.Operand("slots", ffi::S32, {rows}, Numbers(rows, std::max(pages, rows)));
  if (Sometimes(3)) call.Operand("alibi", ffi::F32, {heads});
  if (Sometimes(3)) call.Operand("distances", ffi::F32, {heads, UpTo(50)});
  if (Sometimes(3)) call.Operand("sinks", ffi::F32, {heads});
  call.Real("scale", 0.3f);
  call.Real("softcap", Sometimes() ? 0.0f : 2.0f);
  call.Whole("window", Sometimes() ? 0 : UpTo(40));
  call.Whole("chunk", Sometimes() ? 0 : UpTo(40));
  return call;
}

Drawn Attention() { return AttentionOver(false); }
Drawn PagedAttention() { return AttentionOver(true); }

Drawn AttendTo() {
  Drawn call;
  const ffi::DataType type = Float();
  const bool slots = Sometimes();
  const int64_t rows = UpTo(3), tokens = UpTo(12), kv_heads = UpTo(2), size = UpTo(40), heads = kv_heads * UpTo(3);
  const int64_t memories = slots ? UpTo(4) : rows, positions = UpTo(50);
  call.Operand("q", type, {rows, tokens, heads, size});
  call.Operand("keys", type, {memories, positions, kv_heads, size});
  call.Operand("values", type, {memories, positions, kv_heads, size});
  call.Operand("lengths", ffi::S32, {memories}, Numbers(memories, positions + 1));
  if (slots) call.Operand("slots", ffi::S32, {rows}, Numbers(rows, memories));
  if (Sometimes())
    call.Operand("bias", ffi::F32,
                 {Sometimes() ? 1 : rows, Sometimes() ? 1 : heads, positions, Sometimes() ? 1 : tokens});
  call.Result(type, {rows, tokens, heads, size});
  call.Real("scale", 0.3f);
  return call;
}

Drawn Sample() {
  Drawn call;
  const int64_t rows = UpTo(4), vocabulary = UpTo(100);
  std::vector<int32_t> policy;
  for (int64_t row = 0; row < rows; ++row) {
    const float rules[] = {0.5f, OneOf({1.0f, 0.8f}), OneOf({0.0f, 0.1f}), OneOf({1.0f, 1.5f})};
    int32_t words[4];
    std::memcpy(words, rules, sizeof words);
    policy.push_back(static_cast<int32_t>(Below(vocabulary + 2)));
    policy.insert(policy.end(), std::begin(words), std::end(words));
    for (const int32_t each : Numbers(2, 1000)) policy.push_back(each);
  }
  call.Operand("logits", ffi::F32, {rows, vocabulary});
  call.Operand("seen", ffi::PRED, {rows, vocabulary});
  call.Operand("policy", ffi::S32, {rows, kPolicyColumns}, policy);
  call.Operand("position", ffi::S32, {rows}, Numbers(rows, 1000));
  call.Result(ffi::S32, {rows});
  return call;
}

Drawn PutRows() {
  Drawn call;
  const ffi::DataType type = OneOf({ffi::F32, ffi::BF16, ffi::F16, ffi::S8});
  const int64_t all = UpTo(8), some = UpTo(all), size = UpTo(9), more = UpTo(3);
  const int x = call.Operand("x", type, {all, size, more});
  call.Operand("rows", type, {some, size, more});
  call.Operand("at", ffi::S32, {}, Numbers(1, all));
  call.Updated(x);
  return call;
}

Drawn Cut() {
  Drawn call;
  const int64_t rows = UpTo(5), columns = UpTo(9);
  std::vector<int64_t> places;
  for (int64_t pieces = UpTo(4); pieces > 0; --pieces) {
    const int64_t top = Below(rows), left = Below(columns), count = UpTo(rows - top), width = UpTo(columns - left);
    for (const int64_t each : {top * columns + left, count, columns, width}) places.push_back(each);
    call.Result(ffi::S32, Sometimes() ? Sizes{count, width} : Sizes{count * width});
  }
  call.Operand("x", ffi::S32, Sometimes() ? Sizes{rows, columns} : Sizes{rows * columns});
  call.Many("places", places);
  return call;
}

Drawn WithTokens() {
  Drawn call;
  const int64_t slots = UpTo(4), vocabulary = UpTo(50), rows = UpTo(4);
  const int seen = call.Operand("seen", ffi::PRED, {slots, vocabulary});
  call.Operand("tokens", ffi::S32, {rows}, Numbers(rows, vocabulary));
  if (Sometimes()) call.Operand("slots", ffi::S32, {rows}, Numbers(rows, slots));
  call.Updated(seen);
  return call;
}

Drawn Advance() {
  Drawn call;
  const int64_t rows = UpTo(4), ends = Below(4), rounds = UpTo(9);
  call.Operand("sampled", ffi::S32, {rows}, Numbers(rows, 50));
  call.Operand("token", ffi::S32, {rows}, Numbers(rows, 50));
  call.Operand("left", ffi::S32, {rows}, Numbers(rows, 9));
  call.Operand("eos", ffi::S32, {rows, ends}, Numbers(rows * ends, 50));
  call.Operand("at", ffi::S32, {}, Numbers(1, rounds));
  const int tokens = call.Operand("tokens", ffi::S32, {rows, rounds});
  for (int result = 0; result < 3; ++result) call.Result(ffi::S32, {rows});
  call.Updated(tokens);
  return call;
}

Drawn Normalize(bool biased) {
  Drawn call;
  const ffi::DataType type = Float();
  const Sizes sizes = {UpTo(3), UpTo(3), UpTo(90)};
  call.Operand("x", type, sizes);
  call.Operand("weight", ffi::F32, {sizes.back()});
  if (biased) call.Operand("bias", ffi::F32, {sizes.back()});
  call.Result(type, sizes);
  call.Real("eps", 1e-5f);
  return call;
}

Drawn LayerNorm() { return Normalize(true); }
Drawn RmsNorm() { return Normalize(false); }

Drawn Lora() {
  Drawn call;
  const ffi::DataType x = Float(), type = Sometimes() ? x : ffi::F32;
  const int64_t lead = UpTo(3), rows = UpTo(3), inputs = UpTo(50), outputs = UpTo(200), rank = UpTo(20), count = UpTo(3);
  const int y = call.Operand("y", type, {lead, rows, outputs});
  call.Operand("x", x, {lead, rows, inputs});
  call.Operand("a", x, {count * rank, inputs});
  call.Operand("b", x, {count * rank, outputs});
  call.Operand("adapters", ffi::S32, {lead}, Numbers(lead, count + 1));
  call.Updated(y);
  call.Whole("rank", rank);
  return call;
}

std::vector<int32_t> Sequences(int64_t sequences, int64_t tokens, int64_t places) {
  std::vector<int32_t> table;
  int64_t token = 0;
  for (int64_t i = 0; i < sequences; ++i) {
    const int64_t count = std::min(Below(5), tokens - token);
    for (const int64_t each : {token, count, Below(3), Below(places), Below(places)})
      table.push_back(static_cast<int32_t>(each));
    token += count;
  }
  return table;
}

Drawn ShortConvolution() {
  Drawn call;
  const int64_t rows = UpTo(2), tokens = UpTo(8), features = UpTo(150), size = 1 + UpTo(5), sequences = UpTo(3);
  const int64_t places = UpTo(4);
  call.Operand("x", Float(), {rows, tokens, features});
  call.Operand("weight", ffi::F32, {size, features});
  call.Operand("table", ffi::S32, {sequences, kSequenceColumns}, Sequences(sequences, rows * tokens, places));
  const int state = call.Operand("state", ffi::F32, {places, size - 1, features});
  if (Sometimes()) call.Operand("bias", ffi::F32, {features});
  call.Result(ffi::F32, {rows, tokens, features});
  call.Updated(state);
  call.Text("activation", AnyActivation());
  return call;
}

Drawn LinearAttention() {
  Drawn call;
  const int64_t rows = UpTo(2), tokens = UpTo(6), key_heads = UpTo(2), heads = key_heads * UpTo(2), keys = UpTo(40);
  const int64_t values = UpTo(70), sequences = UpTo(3), places = UpTo(4);
  call.Operand("q", ffi::F32, {rows, tokens, key_heads, keys});
  call.Operand("k", ffi::F32, {rows, tokens, key_heads, keys});
  call.Operand("v", ffi::F32, {rows, tokens, heads, values});
  call.Operand("decay", ffi::F32, {rows, tokens, heads});
  call.Operand("beta", ffi::F32, {rows, tokens, heads});
  call.Operand("table", ffi::S32, {sequences, kSequenceColumns}, Sequences(sequences, rows * tokens, places));
  const int memory = call.Operand("memory", ffi::F32, {places, heads, keys, values});
  call.Result(ffi::F32, {rows, tokens, heads, values});
  call.Updated(memory);
  return call;
}

// Changes something that a handler must see, most of the time.
void Damage(Drawn& call) {
  const auto any_type = [] {
    return OneOf({ffi::F32, ffi::BF16, ffi::F16, ffi::S8, ffi::U8, ffi::S32, ffi::F8E4M3FN, ffi::PRED, ffi::F64});
  };
  const bool of_results = Sometimes(4);
  auto& arrays = of_results ? call.results : call.operands;
  const int64_t number = arrays.empty() ? 0 : Below(arrays.size());
  Array* array = arrays.empty() ? nullptr : &arrays[number];
  const auto attribute = [&]() -> Attribute* {
    if (call.attributes.empty()) return nullptr;
    return &std::next(call.attributes.begin(), Below(call.attributes.size()))->second;
  };
  switch (Below(10)) {
    case 0:
    case 1:
      if (array && !array->sizes.empty()) {
        int64_t& size = array->sizes[Below(array->sizes.size())];
        size = OneOf<int64_t>({size + 1, std::max<int64_t>(size - 1, 0), 0, 2 * size, UpTo(20)});
      }
      break;
    case 2:
      if (array) array->type = any_type();
      break;
    case 3:
      if (array) array->sizes.insert(array->sizes.begin(), UpTo(2));
      break;
    case 4:
      if (array && !array->sizes.empty()) array->sizes.erase(array->sizes.begin() + Below(array->sizes.size()));
      break;
    case 5:
      if (array && !of_results)
        for (auto& result : call.results)
          result.memory = result.memory == number ? -1 : result.memory > number ? result.memory - 1 : result.memory;
      if (array) arrays.erase(arrays.begin() + number);
      break;
    case 6:
      if (array && of_results) array->memory = -1;
      if (array && !of_results) std::swap(*array, arrays[Below(arrays.size())]);
      break;
    case 7:
      if (array && !of_results) array->name = OneOf<const char*>({"", "other", "cache.1", "parts.1.weight", "x", "v"});
      break;
    case 8:
      if (Attribute* chosen = attribute()) {
        chosen->whole = Odd();
        const auto bits = static_cast<uint32_t>(random_bits());
        std::memcpy(&chosen->real, &bits, sizeof bits);
        if (Sometimes()) chosen->text = OneOf<const char*>({"", "gelu", "nf4", "nothing"});
        if (!chosen->many.empty()) chosen->many[Below(chosen->many.size())] = Odd();
        if (!chosen->many.empty() && Sometimes(4)) chosen->many.pop_back();
      }
      break;
    default:
      if (Attribute* chosen = attribute()) {
        if (Sometimes()) chosen->type = any_type();
        else call.attributes.erase(call.attributes.begin());
      }
  }
}

// The memory of an array, of just its size.
struct Memory {
  std::unique_ptr<char, void (*)(void*)> bytes{nullptr, std::free};

  Memory(const Array& array, bool odd) {
    const int64_t count = array.Count(), size = count * static_cast<int64_t>(ffi::ByteWidth(array.type));
    void* memory = nullptr;
    if (posix_memalign(&memory, 64, size)) std::abort();
    bytes.reset(static_cast<char*>(memory));
    for (int64_t i = 0; i < size; ++i) bytes.get()[i] = static_cast<char>(random_bits());
    if (array.type == ffi::F32 && !Sometimes(8))
      for (int64_t i = 0; i < count; ++i) Put(i, static_cast<float>(Below(2001) - 1000) / 1000);
    if (array.type == ffi::PRED)
      for (int64_t i = 0; i < count; ++i) bytes.get()[i] &= 1;
    if (array.type != ffi::S32) return;
    for (int64_t i = 0; i < count; ++i)
      Put(i, i < static_cast<int64_t>(array.whole.size()) ? array.whole[i] : static_cast<int32_t>(Below(8)));
    for (int64_t i = 0; odd && count > 0 && i < 2; ++i) Put(Below(count), static_cast<int32_t>(Odd()));
  }

  template <typename Number>
  void Put(int64_t i, Number number) { std::memcpy(bytes.get() + i * sizeof number, &number, sizeof number); }
};

Threads threads(2);

XLA_FFI_Api Api() {
  XLA_FFI_Api api = {};
  api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
  api.XLA_FFI_Error_Create = [](XLA_FFI_Error_Create_Args* args) { return new XLA_FFI_Error{args->message}; };
  api.XLA_FFI_ThreadPool_Schedule = [](XLA_FFI_ThreadPool_Schedule_Args* args) -> XLA_FFI_Error* {
    threads.Schedule([task = args->task, data = args->data] { task(data); });
    return nullptr;
  };
  api.XLA_FFI_ThreadPool_NumThreads = [](XLA_FFI_ThreadPool_NumThreads_Args* args) -> XLA_FFI_Error* {
    *args->num_threads = threads.num_threads();
    return nullptr;
  };
  return api;
}

// Makes the call, and returns the handler's message, which is empty if it computed.
std::string Made(XLA_FFI_Handler* handle, const Drawn& call, bool odd, bool damaged) {
  static const XLA_FFI_Api api = Api();
  std::vector<Memory> memory;
  std::vector<XLA_FFI_Buffer> buffers;
  std::string names;
  for (const auto* arrays : {&call.operands, &call.results})
    for (const Array& array : *arrays) {
      memory.emplace_back(array, odd);
      const bool updated = array.memory >= 0 && array.memory < static_cast<int>(call.operands.size()) &&
                           array.type == call.operands[array.memory].type && array.sizes == call.operands[array.memory].sizes;
      void* data = updated ? memory[array.memory].bytes.get() : memory.back().bytes.get();
      buffers.push_back({XLA_FFI_Buffer_STRUCT_SIZE, nullptr, static_cast<XLA_FFI_DataType>(array.type), data,
                         static_cast<int64_t>(array.sizes.size()), const_cast<int64_t*>(array.sizes.data())});
      if (arrays == &call.operands) names += (names.empty() ? "" : " ") + array.name;
    }
  std::vector<void*> all;
  for (auto& buffer : buffers) all.push_back(&buffer);
  std::vector<XLA_FFI_ArgType> operand_types(call.operands.size(), XLA_FFI_ArgType_BUFFER);
  std::vector<XLA_FFI_RetType> result_types(call.results.size(), XLA_FFI_RetType_BUFFER);

  auto attributes = call.attributes;
  if (!damaged || !Sometimes(20)) attributes["operands"] = {XLA_FFI_AttrType_STRING, ffi::S64, 0, 0, names, {}};
  std::vector<XLA_FFI_AttrType> kinds;
  std::vector<XLA_FFI_ByteSpan> spans, texts(attributes.size());
  std::vector<XLA_FFI_Scalar> scalars(attributes.size());
  std::vector<XLA_FFI_Array> arrays(attributes.size());
  std::vector<void*> values;
  std::vector<XLA_FFI_ByteSpan*> keys;
  spans.reserve(attributes.size());
  for (auto& [name, value] : attributes) {
    const size_t i = kinds.size();
    kinds.push_back(value.kind);
    spans.push_back({name.data(), name.size()});
    keys.push_back(&spans.back());
    texts[i] = {value.text.data(), value.text.size()};
    const bool real = value.type == ffi::F32;
    scalars[i] = {static_cast<XLA_FFI_DataType>(value.type), real ? static_cast<void*>(&value.real) : &value.whole};
    arrays[i] = {static_cast<XLA_FFI_DataType>(value.type), value.many.size(), value.many.data()};
    const bool array = value.kind == XLA_FFI_AttrType_ARRAY;
    values.push_back(value.kind == XLA_FFI_AttrType_STRING ? static_cast<void*>(&texts[i])
                     : array                               ? static_cast<void*>(&arrays[i])
                                                           : &scalars[i]);
  }
  XLA_FFI_CallFrame frame = {};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = &api;
  frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<int64_t>(call.operands.size()), operand_types.data(),
                all.data()};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, static_cast<int64_t>(call.results.size()), result_types.data(),
                all.data() + call.operands.size()};
  frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE, nullptr, static_cast<int64_t>(kinds.size()), kinds.data(), keys.data(),
                 values.data()};
  const std::unique_ptr<XLA_FFI_Error> error(handle(&frame));
  return error ? error->message : "";
}

const std::map<std::string, Drawn (*)()> draws = {
    {"linear", Linear}, {"attention", Attention}, {"paged_attention", PagedAttention}, {"attend_to", AttendTo},
    {"sample", Sample}, {"put_rows", PutRows}, {"layer_norm", LayerNorm}, {"rms_norm", RmsNorm}, {"lora", Lora},
    {"cut", Cut}, {"with_tokens", WithTokens}, {"advance", Advance},
    {"short_convolution", ShortConvolution}, {"gated_delta_rule", LinearAttention},
    {"selective_scan", LinearAttention}};

int Run(const std::string& kernel, int64_t calls, uint64_t seed) {
  const auto levels = Levels();
  const auto draw = draws.find(kernel);
  XLA_FFI_Handler* handle = nullptr;
  for (const auto& [name, own] : Handlers())
    if (name == kernel) handle = own;
  if (draw == draws.end() || !handle) {
    std::fprintf(stderr, "there is no kernel %s here\n", kernel.c_str());
    return 2;
  }
  int64_t computed = 0, refused = 0;
  for (int64_t i = 0; i < calls; ++i) {
    random_bits.seed(seed + i);  // so that a call can be made again alone
    SetLevel(*levels[Below(levels.size())]);
    Drawn call = draw->second();
    const bool damaged = Sometimes(), odd = Sometimes();
    for (int64_t times = damaged ? UpTo(2) : 0; times > 0; --times) Damage(call);
    const std::string message = Made(handle, call, odd || damaged, damaged);
    ++(message.empty() ? computed : refused);
    if (!damaged && !message.empty()) {
      std::fprintf(stderr, "call %lld was whole, and refused: %s\n", static_cast<long long>(i), message.c_str());
      return 1;
    }
  }
  std::printf("%lld %lld\n", static_cast<long long>(computed), static_cast<long long>(refused));
  return 0;
}

}  // namespace
}  // namespace neuronx

int main(int count, char** words) {
  if (count < 3) {
    std::fprintf(stderr, "usage: %s KERNEL CALLS [SEED]\n", words[0]);
    return 2;
  }
  return neuronx::Run(words[1], std::atoll(words[2]), count > 3 ? std::atoll(words[3]) : 0);
}
