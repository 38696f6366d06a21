// The handlers of the custom calls that XLA makes. They check a call whole before a kernel sees it.
#include "handlers.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <iterator>
#include <memory>
#include <new>
#include <string_view>
#include <utility>

#include "call.h"
#include "experts.h"
#include "parallel.h"

namespace neuronx {
namespace {

std::atomic<const Kernels*> level{nullptr};  // set before the first call of a kernel

Spent linear_spent{"linear"}, attention_spent{"attention"}, memory_spent{"attend_to"}, sample_spent{"sample"},
    rows_spent{"rows"}, norm_spent{"norm"}, lora_spent{"lora"}, states_spent{"states"};

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

struct Aligned {
  static constexpr std::align_val_t kLine{64};
  void operator()(char* memory) const { operator delete[](memory, kLine); }
};

// Memory of a thread, kept for its next call.
void* Scratch(int64_t bytes) {
  thread_local std::unique_ptr<char[], Aligned> memory;
  thread_local int64_t size = 0;
#ifdef __SANITIZE_ADDRESS__
  size = 0;  // memory of just the size that a call may touch
#endif
  if (size < bytes) {
    memory.reset(static_cast<char*>(operator new[](bytes, Aligned::kLine)));
    size = bytes;
  }
  return memory.get();
}

Type TypeOf(ffi::DataType type) {  // of those that kernels take
  switch (type) {
    case ffi::F32: return Type::kF32;
    case ffi::BF16: return Type::kBF16;
    case ffi::F16: return Type::kF16;
    case ffi::S8: return Type::kS8;
    case ffi::F8E4M3FN: return Type::kF8;
    default: return Type::kS4;  // U8, of two numbers
  }
}

const Kernels& Level() { return *level.load(std::memory_order_relaxed); }

constexpr Types kFloats = {ffi::F32, ffi::BF16, ffi::F16};
constexpr Types kScales = {ffi::F32, ffi::BF16, ffi::F16, ffi::S8};

Activation ActivationOf(const Call& call) {
  constexpr std::pair<std::string_view, Activation> all[] = {
      {"", Activation::kNone}, {"gelu", Activation::kGelu}, {"gelu_fast", Activation::kGeluTanh},
      {"gelu_new", Activation::kGeluTanh}, {"gelu_pytorch_tanh", Activation::kGeluTanh}, {"relu", Activation::kRelu},
      {"relu2", Activation::kRelu2}, {"silu", Activation::kSilu}, {"swish", Activation::kSilu}, {"tanh", Activation::kTanh}};
  const auto name = call.Attribute<std::string_view>("activation");
  const auto* found = std::find_if(std::begin(all), std::end(all), [&](const auto& each) { return each.first == name; });
  call.Must(found != std::end(all), "activation must be one that the kernel has");
  return found->second;
}

// What bytes of two weights have.
Type CodesOf(const Call& call) {
  constexpr std::pair<std::string_view, Type> all[] = {
      {"", Type::kS4}, {"e2m1", Type::kE2M1}, {"nf4", Type::kNF4}, {"fp4", Type::kFP4}};
  const auto name = call.Attribute<std::string_view>("codes");
  const auto* found = std::find_if(std::begin(all), std::end(all), [&](const auto& each) { return each.first == name; });
  call.Must(found != std::end(all), "codes must be those that the kernel has");
  return found->second;
}

struct Part {
  std::string_view weight, scale, minimum, scale_unit, minimum_unit, bias;
};
#define NEURONX_PART(n) {"parts." n ".weight", "parts." n ".scale", "parts." n ".minimum", "parts." n ".scale_unit", \
                         "parts." n ".minimum_unit", "parts." n ".bias"}
constexpr Part kParts[kMostParts] = {NEURONX_PART("0"), NEURONX_PART("1"), NEURONX_PART("2")};

// What the parts of a linear layer have in common: the first part determines it. With experts, a part is a stack.
struct Alike {
  int64_t words = kAny, word = kAny, groups = kAny, blocks = kAny, experts = kAny;
  ffi::DataType weight = ffi::DataType::INVALID, scale = ffi::DataType::INVALID, unit = ffi::DataType::INVALID;
  bool grouped = false, minima = false;
  Axes axes = kApart;
};

// Reads the weight of a part with `outputs`, and what belongs to it. `each` gets the bytes that an expert has of it.
Weight PartOf(Call& call, const Part& names, ffi::DataType x, int64_t outputs, Alike& alike, Stride& each) {
  const bool first = alike.weight == ffi::DataType::INVALID;
  const auto stacked = [&](const Array& array, const void** data, int64_t& bytes) {
    if (!array) return;
    *data = array.data;
    if (alike.axes != kOfEach) return;
    if (alike.experts == kAny) alike.experts = array.sizes.front();
    call.Must(array.sizes.front() == alike.experts, array, "of as many experts as the first weight");
    bytes = array.Bytes();
  };
  int64_t panels = (outputs + kPanel - 1) / kPanel, panel = kPanel, one = 1;
  const auto weight = call.Operand(names.weight, {x, ffi::S8, ffi::U8, ffi::F8E4M3FN},
                                   {&panels, &alike.words, &panel, &alike.word}, alike.axes);
  call.Must(first || weight.type == alike.weight, weight, "of the first weight's type");
  alike.weight = weight.type;
  Array scale, minimum, scale_unit, minimum_unit;
  if (weight.type != x) {
    scale = call.Next(names.scale, alike.axes);
    alike.grouped = first ? weight.type == ffi::U8 || scale.Rank() == 4 : alike.grouped;
    if (alike.grouped) {
      call.Expect(scale, kScales, {&panels, &alike.groups, &panel, &one});
      if (weight.type != ffi::F8E4M3FN)
        minimum = call.Optional(names.minimum, {scale.type}, {&panels, &alike.groups, &panel, &one}, alike.axes);
      if (scale.type == ffi::S8) {
        scale_unit = call.Operand(names.scale_unit, kFloats, {&panels, &alike.blocks, &panel, &one}, alike.axes);
        if (minimum)
          minimum_unit =
              call.Operand(names.minimum_unit, {scale_unit.type}, {&panels, &alike.blocks, &panel, &one}, alike.axes);
        call.Must(first || scale_unit.type == alike.unit, scale_unit, "of the first unit's type");
        alike.unit = scale_unit.type;
      }
    } else {
      call.Expect(scale, {ffi::F32}, {&outputs});
    }
    call.Must(first || scale.type == alike.scale, scale, "of the first scale's type");
    call.Must(first || bool(minimum) == alike.minima, "all parts must have minima, or none");
    alike.scale = scale.type;
    alike.minima = bool(minimum);
  }
  const Array bias = call.Optional(names.bias, {x}, {&outputs}, alike.axes);
  Weight part = {};
  part.outputs = outputs;
  stacked(weight, &part.data, each.data);
  stacked(scale, &part.scale, each.scale);
  stacked(minimum, &part.minimum, each.minimum);
  stacked(scale_unit, &part.scale_unit, each.scale_unit);
  stacked(minimum_unit, &part.minimum_unit, each.minimum_unit);
  stacked(bias, &part.bias, each.bias);
  return part;
}

// With an activation there is one result, otherwise one of each part.
void Linear(Call& call, const Pool& pool) {
  int64_t rows = kAny, inputs = kAny, outputs = kAny;
  const Array x = call.Operand("x", kFloats, {&rows, &inputs}, kInRows);
  const Array experts = call.Optional("experts", {ffi::S32}, {&rows});
  Stride of_expert[kMostParts] = {};
  LinearArguments arguments = {};
  arguments.activation = ActivationOf(call);
  arguments.rounded = call.Attribute<int64_t>("rounded");
  const Type codes = CodesOf(call);
  const bool activated = arguments.activation != Activation::kNone;
  Array y;
  Alike alike;
  if (experts) alike.axes = kOfEach;
  int& parts = arguments.parts;
  for (; parts < kMostParts && (parts == 0 || call.Has(kParts[parts].weight)); ++parts) {
    const bool first = parts == 0;
    if (first || !activated) {
      outputs = kAny;
      const Array own = call.Result("y", kFloats, {&rows, &outputs}, kInRows);
      call.Must(first || own.type == y.type, own, "of the first result's type");
      y = own;
    }
    arguments.weights[parts] = PartOf(call, kParts[parts], x.type, outputs, alike, of_expert[parts]);
    arguments.weights[parts].y = y.data;
  }
  const Array residual = call.Optional("residual", {y.type}, {&rows, &outputs}, kInRows);
  call.Done();
  call.Must(!activated || parts < 3, "an activation must have one part or two");
  call.Must(!residual || activated || parts == 1, "a residual must have one result");
  call.Must(!residual || !experts, "with experts there must be no residual");

  const bool floats = alike.weight == x.type, grouped = alike.grouped;
  const bool whole = alike.weight == ffi::S8 || (alike.weight == ffi::U8 && codes == Type::kS4);
  call.Must(codes == Type::kS4 || (alike.weight == ffi::U8 && !alike.minima), "codes must be in bytes, without minima");
  call.Must(whole || alike.scale != ffi::S8, "scales in two levels must be of whole numbers");
  const int64_t in_word = floats && x.type != ffi::BF16 ? 1 : floats ? 2 : 4;
  const int64_t bits = alike.weight == ffi::U8 && inputs > 0 ? alike.words * 32 / inputs : 0;  // 4, 5 or 6
  call.Must(codes == Type::kS4 || bits == 4, "codes must be of four bits");
  const int64_t of_word = bits == 5 ? 32 : bits == 6 ? 16 : bits ? 8 : in_word;  // or of words that belong together
  const int64_t words = bits == 5 || bits == 6 ? inputs * bits / 32 : (inputs + of_word - 1) / of_word;
  call.Must(alike.word == in_word && alike.words == words, "weights must be in panels of all inputs of x");
  call.Must(!grouped || (alike.groups > 0 && inputs % alike.groups == 0), "each scale must be of as many inputs");
  arguments.group = grouped ? inputs / alike.groups : 0;
  const bool levels = alike.scale == ffi::S8;
  call.Must(!levels || (alike.blocks > 0 && alike.groups % alike.blocks == 0), "each unit must be of as many groups");
  arguments.block = levels ? inputs / alike.blocks : 0;
  // By how much products are larger than those of s4: sums of a group are of 32 bits.
  const bool eight = alike.weight == ffi::S8 && !arguments.rounded && x.type != ffi::F32;
  const int64_t larger = eight ? 8 : bits > 4 ? 4 : 1;
  for (const int64_t group : {arguments.group, arguments.rounded})
    call.Must(group >= 0 && group <= kLargestGroup / larger && group % of_word == 0,
              "groups must be of whole words, and small");
  call.Must(!grouped || arguments.group > 0, "groups must have inputs");
  call.Must(!arguments.rounded || (whole && (!grouped || arguments.rounded == arguments.group)),
            "activations must be rounded in the groups of whole weights");

  arguments.rows = rows;
  arguments.inputs = inputs;
  arguments.x_type = TypeOf(x.type);
  const Type in_bytes = bits == 5 ? Type::kS5 : bits == 6 ? Type::kS6 : codes;
  arguments.weight_type = bits ? in_bytes : TypeOf(alike.weight);
  arguments.scale_type = TypeOf(levels ? alike.unit : alike.scale);
  arguments.y_type = TypeOf(y.type);
  arguments.x = x.data;
  arguments.residual = residual.data;
  if (experts) {
    const Routed routed(experts.As<int32_t>(), rows, alike.experts);
    const auto scratch = [](const LinearArguments& own) { return Level().linear_scratch(own); };
    const Gathered gathered(arguments, of_expert, routed, ffi::ByteWidth(x.type), ffi::ByteWidth(y.type), scratch);
    gathered.Run(Scratch(gathered.Bytes()), [&](auto& own) { Level().linear(own.data(), own.size(), pool); });
    return;
  }
  arguments.scratch = Scratch(Level().linear_scratch(arguments));
  Level().linear(&arguments, 1, pool);
}

// The arrays of the cache are updated in place: the results after the context are in their memory.
void AttentionOver(Call& call, const Pool& pool, bool paged) {
  int64_t rows = kAny, tokens = kAny, heads = kAny, kv_heads = kAny, size = kAny, blocks = kAny, page = kAny, one = 1;
  int64_t distances = kAny, sequences = kAny, columns = kAny;
  const Array q = call.Operand("q", kFloats, {&rows, &tokens, &heads, &size});
  const Array k = call.Operand("k", {q.type}, {&rows, &tokens, &kv_heads, &size});
  const Array v = call.Optional("v", {q.type}, {&rows, &tokens, &kv_heads, &size});
  Array segments, start, length, slots;
  if (paged) {
    segments = call.Operand("segments", {ffi::S32}, {&sequences, &columns});
  } else {
    start = call.Operand("start", {ffi::S32}, {&rows});
    length = call.Operand("length", {ffi::S32}, {&rows});
  }
  constexpr std::string_view names[] = {"cache.0", "cache.1", "cache.2", "cache.3"};
  const int parts = v ? 2 : 1;  // keys and values, or keys that are both
  Array cache[4], after[4];
  cache[0] = call.Operand(names[0], {q.type, ffi::S8}, {&blocks, &page, &size});
  if (v) cache[1] = call.Operand(names[1], {cache[0].type}, {&blocks, &page, &size});
  for (int i = parts; i < 2 * parts && cache[0].type == ffi::S8; ++i)
    cache[i] = call.Operand(names[i], {ffi::F32}, {&blocks, &page, &one});
  if (!paged) slots = call.Optional("slots", {ffi::S32}, {&rows});
  const Array slopes = call.Optional("alibi", {ffi::F32}, {&heads});
  const Array biases = call.Optional("distances", {ffi::F32}, {&heads, &distances});
  const Array sinks = call.Optional("sinks", {ffi::F32}, {&heads});
  const Array context = call.Result("the context", {q.type}, {&rows, &tokens, &heads, &size});
  for (int i = 0; i < 4 && cache[i]; ++i) {
    after[i] = call.Result(cache[i].name, {cache[i].type}, {&blocks, &page, i < parts ? &size : &one});
    call.Must(after[i].data == cache[i].data, after[i], "returned in its own memory");
  }
  call.Done();
  call.Must(size <= kLongestHead, q, "of no more features than the kernel takes");
  call.Must(kv_heads > 0 && heads % kv_heads == 0, k, "of as many queries for each head");
  call.Must(blocks % kv_heads == 0, cache[0], "of whole slots or pages");
  call.Must(!biases || (distances > 0 && heads * distances <= kMostBiases), biases, "of one distance or more, and small");

  AttentionArguments arguments = {
      rows, tokens, heads, kv_heads, size, blocks / kv_heads, page, 1, 1, call.Attribute<int64_t>("window"),
      call.Attribute<int64_t>("chunk"), biases ? distances : 0, call.Attribute<float>("scale"), call.Attribute<float>("softcap"), TypeOf(q.type),
      TypeOf(cache[0].type), q.data, k.data, v.data, start.As<int32_t>(), length.As<int32_t>(), nullptr,
      slots.As<int32_t>(), nullptr, slopes.As<float>(), biases.As<float>(), sinks.As<float>(), after[0].data,
      after[parts - 1].data, after[parts].As<float>(), after[2 * parts - 1].As<float>(), context.data};
  if (paged) {
    const int32_t* row = segments.As<int32_t>();
    arguments.rows = sequences;
    arguments.tokens = rows * tokens;
    arguments.stride = columns;
    arguments.most = columns - kRowColumns;
    arguments.first = row;
    arguments.length = row + 1;
    arguments.start = row + 2;
    arguments.prompt = row + 3;
    arguments.table = row + kRowColumns;
    call.Must(arguments.most > 0, segments, "of one page or more");
    const bool apart = page > 0 && page % kPage == 0 && (page & (page - 1)) == 0;
    call.Must(arguments.most == 1 || apart, cache[0], "of pages of 16 positions, or 16 times a power of two");
  }
  Level().attention(arguments, pool);
}

void Attention(Call& call, const Pool& pool) { AttentionOver(call, pool, false); }
void PagedAttention(Call& call, const Pool& pool) { AttentionOver(call, pool, true); }

void AttendTo(Call& call, const Pool& pool) {
  int64_t rows = kAny, tokens = kAny, heads = kAny, kv_heads = kAny, size = kAny, memories = kAny, positions = kAny;
  int64_t bias_rows = kAny, bias_heads = kAny, bias_tokens = kAny;
  const Array q = call.Operand("q", kFloats, {&rows, &tokens, &heads, &size});
  const Array keys = call.Operand("keys", {q.type}, {&memories, &positions, &kv_heads, &size});
  const Array values = call.Operand("values", {q.type}, {&memories, &positions, &kv_heads, &size});
  const Array lengths = call.Operand("lengths", {ffi::S32}, {&memories});
  const Array slots = call.Optional("slots", {ffi::S32}, {&rows});
  const Array bias = call.Optional("bias", {ffi::F32}, {&bias_rows, &bias_heads, &positions, &bias_tokens});
  const Array context = call.Result("the context", {q.type}, {&rows, &tokens, &heads, &size});
  call.Done();
  call.Must(size <= kLongestHead, q, "of no more features than the kernel takes");
  call.Must(kv_heads > 0 && heads % kv_heads == 0, keys, "of as many queries for each head");
  call.Must(slots ? memories > 0 : memories == rows, keys, "of as many rows as q, or of those that slots name");
  MemoryArguments arguments = {rows, tokens, heads, kv_heads, size, memories, positions, 0, 0, 0, 0,
                               call.Attribute<float>("scale"), TypeOf(q.type), q.data, keys.data, values.data,
                               lengths.As<int32_t>(), slots.As<int32_t>(), bias.As<float>(), context.data};
  if (bias) {
    const int64_t of_head = positions * bias_tokens;
    const auto shared = [](int64_t own, int64_t all) { return own == 1 || own == all; };
    call.Must(shared(bias_rows, rows) && shared(bias_heads, heads) && shared(bias_tokens, tokens), bias,
              "of all rows, heads and tokens, or of one for all");
    call.Must(bias_rows * bias_heads * of_head <= kMostBiases, bias, "of fewer numbers");
    arguments.bias_row = bias_rows > 1 ? bias_heads * of_head : 0;
    arguments.bias_head = bias_heads > 1 ? of_head : 0;
    arguments.bias_position = bias_tokens;
    arguments.bias_token = bias_tokens > 1 ? 1 : 0;
  }
  Level().attend_to(arguments, pool);
}

void Sample(Call& call, const Pool& pool) {
  int64_t rows = kAny, vocabulary = kAny, columns = kPolicyColumns;
  const Array logits = call.Operand("logits", {ffi::F32}, {&rows, &vocabulary});
  const Array seen = call.Operand("seen", {ffi::PRED}, {&rows, &vocabulary});
  const Array policy = call.Operand("policy", {ffi::S32}, {&rows, &columns});
  const Array position = call.Operand("position", {ffi::S32}, {&rows});
  const Array token = call.Result("the token", {ffi::S32}, {&rows});
  call.Done();
  SampleArguments arguments = {rows, vocabulary, logits.As<float>(), seen.As<int8_t>(), policy.As<int32_t>(),
                               position.As<int32_t>(), token.As<int32_t>(), nullptr};
  arguments.scratch = Scratch(Level().sample_scratch(arguments));
  Level().sample(arguments, pool);
}

void PutRows(Call& call, const Pool&) {
  int64_t all = kAny, some = kAny, size = kAny;  // a row has one axis here, or several as one
  const Array x = call.Operand("x", {ffi::F32, ffi::BF16, ffi::F16, ffi::S8}, {&all, &size}, kFirst);
  const Array rows = call.Operand("rows", {x.type}, {&some, &size}, kFirst);
  const Array at = call.Operand("at", {ffi::S32}, {});
  const Array after = call.Result("x", {x.type}, {&all, &size}, kFirst);
  call.Done();
  call.Must(some <= all, rows, "of no more rows than x");
  call.Must(after.data == x.data, after, "returned in its own memory");
  const int64_t first = std::clamp<int64_t>(*at.As<int32_t>(), 0, all - some);
  const int64_t bytes = size * static_cast<int64_t>(ffi::ByteWidth(x.type));
  std::memcpy(after.As<char>() + first * bytes, rows.data, some * bytes);
}

// Pieces of integers: of each, where its first row begins, the number of rows, from one to the next, and their width.
void Cut(Call& call, const Pool&) {
  int64_t lead = kAny, last = kAny;
  const Array x = call.Operand("x", {ffi::S32}, {&lead, &last}, kInRows);
  const auto places = call.Attribute<ffi::Span<const int64_t>>("places");
  call.Must(places.size() % 4 == 0, "attribute places must have four numbers of each piece");
  const int64_t size = lead * last;
  for (size_t place = 0; place < places.size(); place += 4) {
    const int64_t first = places[place], rows = places[place + 1], pitch = places[place + 2], width = places[place + 3];
    const bool within = [&] {
      for (const int64_t each : {first, rows, pitch, width})
        if (each < 0 || each > size) return false;
      return rows == 0 || first + (rows - 1) * pitch + width <= size;
    }();
    call.Must(within, x, "of all the numbers that attribute places names");
    int64_t of_piece = kAny, columns = kAny;
    const Array piece = call.Result("piece", {ffi::S32}, {&of_piece, &columns}, kInRows);
    call.Must(of_piece * columns == rows * width, piece, "of as many numbers as its place has");
    for (int64_t row = 0; row < rows; ++row)
      std::copy_n(x.As<int32_t>() + first + row * pitch, width, piece.As<int32_t>() + row * width);
  }
  call.Done();
}

void WithTokens(Call& call, const Pool&) {
  int64_t slots = kAny, vocab = kAny, rows = kAny;
  const Array seen = call.Operand("seen", {ffi::PRED}, {&slots, &vocab});
  const Array tokens = call.Operand("tokens", {ffi::S32}, {&rows});
  const Array named = call.Optional("slots", {ffi::S32}, {&rows});
  const Array after = call.Result("seen", {ffi::PRED}, {&slots, &vocab});
  call.Done();
  call.Must(after.data == seen.data, after, "returned in its own memory");
  if (slots * vocab == 0) return;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t token = tokens.As<int32_t>()[row], slot = named ? named.As<int32_t>()[row] : row;
    if (token < 0) continue;
    after.As<bool>()[std::clamp<int64_t>(slot, 0, slots - 1) * vocab + std::min(token, vocab - 1)] = true;
  }
}

void Advance(Call& call, const Pool&) {
  constexpr int32_t kNothing = -1;
  int64_t rows = kAny, ends = kAny, rounds = kAny;
  const Array sampled = call.Operand("sampled", {ffi::S32}, {&rows});
  const Array token = call.Operand("token", {ffi::S32}, {&rows});
  const Array left = call.Operand("left", {ffi::S32}, {&rows});
  const Array eos = call.Operand("eos", {ffi::S32}, {&rows, &ends});
  const Array at = call.Operand("at", {ffi::S32}, {});
  const Array tokens = call.Operand("tokens", {ffi::S32}, {&rows, &rounds});
  const Array found = call.Result("sampled", {ffi::S32}, {&rows});
  const Array last = call.Result("token", {ffi::S32}, {&rows});
  const Array rest = call.Result("left", {ffi::S32}, {&rows});
  const Array after = call.Result("tokens", {ffi::S32}, {&rows, &rounds});
  call.Done();
  call.Must(rounds > 0, tokens, "of at least one round");
  call.Must(after.data == tokens.data, after, "returned in its own memory");
  const int64_t round = std::clamp<int64_t>(*at.As<int32_t>(), 0, rounds - 1);
  for (int64_t row = 0; row < rows; ++row) {
    const int32_t wanted = left.As<int32_t>()[row], chosen = wanted > 0 ? sampled.As<int32_t>()[row] : kNothing;
    const int32_t* own = eos.As<int32_t>() + row * ends;
    const bool ended = chosen < 0 || std::find(own, own + ends, chosen) != own + ends;
    found.As<int32_t>()[row] = after.As<int32_t>()[row * rounds + round] = chosen;
    last.As<int32_t>()[row] = chosen < 0 ? token.As<int32_t>()[row] : chosen;
    rest.As<int32_t>()[row] = ended ? 0 : wanted - 1;
  }
}

void Normalize(Call& call, const Pool& pool, bool biased) {
  int64_t rows = kAny, size = kAny;
  const Array x = call.Operand("x", kFloats, {&rows, &size}, kInRows);
  const Array weight = call.Operand("weight", {ffi::F32}, {&size});
  const Array bias = biased ? call.Operand("bias", {ffi::F32}, {&size}) : Array();
  const Array y = call.Result("y", {x.type}, {&rows, &size}, kInRows);
  call.Done();
  const auto eps = call.Attribute<float>("eps");
  Level().normalize({rows, size, eps, TypeOf(x.type), x.data, weight.As<float>(), bias.As<float>(), y.data}, pool);
}

void LayerNorm(Call& call, const Pool& pool) { Normalize(call, pool, true); }
void RmsNorm(Call& call, const Pool& pool) { Normalize(call, pool, false); }

void Lora(Call& call, const Pool& pool) {
  int64_t rows = kAny, inputs = kAny, outputs = kAny, ranks = kAny, lead = kAny;
  const Array y = call.Operand("y", kFloats, {&rows, &outputs}, kInRows);
  const Array x = call.Operand("x", kFloats, {&rows, &inputs}, kInRows);
  const Array a = call.Operand("a", {x.type}, {&ranks, &inputs});
  const Array b = call.Operand("b", {x.type}, {&ranks, &outputs});
  const Array adapters = call.Operand("adapters", {ffi::S32}, {&lead});
  const Array after = call.Result("y", {y.type}, {&rows, &outputs}, kInRows);
  call.Done();
  const auto rank = call.Attribute<int64_t>("rank");
  call.Must(y.type == x.type || y.type == ffi::F32, y, "of the type of x, or f32");
  call.Must(rank > 0 && ranks % rank == 0, a, "of whole adapters");
  call.Must(lead > 0 ? rows % lead == 0 : rows == 0, adapters, "of as many rows of x each");
  call.Must(after.data == y.data, after, "returned in its own memory");
  LoraArguments arguments = {rows, lead > 0 ? rows / lead : 1, inputs, outputs, ranks / rank, rank, TypeOf(x.type),
                             TypeOf(y.type), x.data, a.data, b.data, adapters.As<int32_t>(), after.data, nullptr};
  arguments.scratch = Scratch(Level().lora_scratch(arguments));
  Level().add_adapters(arguments, pool);
}

// Reads the sequences of a step and the array of their states, which is updated in place: the result after y.
StepArguments StepOf(Call& call, const Array& states, const Array& table, const Array& after, int64_t tokens) {
  call.Must(after.data == states.data, after, "returned in its own memory");
  return {table.Size(0), tokens, states.Size(0), table.As<int32_t>()};
}

void ShortConvolution(Call& call, const Pool& pool) {
  int64_t rows = kAny, tokens = kAny, features = kAny, size = kAny, sequences = kAny, places = kAny, kept = kAny;
  int64_t columns = kSequenceColumns;
  const Array x = call.Operand("x", kFloats, {&rows, &tokens, &features});
  const Array weight = call.Operand("weight", {ffi::F32}, {&size, &features});
  const Array table = call.Operand("table", {ffi::S32}, {&sequences, &columns});
  const Array state = call.Operand("state", {ffi::F32}, {&places, &kept, &features});
  const Array bias = call.Optional("bias", {ffi::F32}, {&features});
  const Array y = call.Result("y", {ffi::F32}, {&rows, &tokens, &features});
  const Array after = call.Result("state", {ffi::F32}, {&places, &kept, &features});
  call.Done();
  call.Must(size > 1 && size <= kMostTaps, weight, "of two tokens or more, and no more than the kernel takes");
  call.Must(kept == size - 1, state, "of one token less than weight");
  const StepArguments step = StepOf(call, state, table, after, rows * tokens);
  Level().short_convolution({step, features, size, TypeOf(x.type), ActivationOf(call), x.data, weight.As<float>(),
                             bias.As<float>(), after.As<float>(), y.As<float>()}, pool);
}

template <void (*Kernels::*kKernel)(const LinearAttentionArguments&, const Pool&)>
void LinearAttention(Call& call, const Pool& pool) {
  int64_t rows = kAny, tokens = kAny, key_heads = kAny, heads = kAny, keys = kAny, values = kAny, sequences = kAny;
  int64_t places = kAny, columns = kSequenceColumns;
  const Array q = call.Operand("q", {ffi::F32}, {&rows, &tokens, &key_heads, &keys});
  const Array k = call.Operand("k", {ffi::F32}, {&rows, &tokens, &key_heads, &keys});
  const Array v = call.Operand("v", {ffi::F32}, {&rows, &tokens, &heads, &values});
  const Array decay = call.Operand("decay", {ffi::F32}, {&rows, &tokens, &heads});
  const Array beta = call.Operand("beta", {ffi::F32}, {&rows, &tokens, &heads});
  const Array table = call.Operand("table", {ffi::S32}, {&sequences, &columns});
  const Array memory = call.Operand("memory", {ffi::F32}, {&places, &heads, &keys, &values});
  const Array y = call.Result("y", {ffi::F32}, {&rows, &tokens, &heads, &values});
  const Array after = call.Result("memory", {ffi::F32}, {&places, &heads, &keys, &values});
  call.Done();
  call.Must(keys <= kLongestKey, k, "of no more features than the kernel takes");
  call.Must(key_heads > 0 && heads % key_heads == 0, v, "of as many heads for each key");
  const StepArguments step = StepOf(call, memory, table, after, rows * tokens);
  (Level().*kKernel)({step, key_heads, heads, keys, values, q.As<float>(), k.As<float>(), v.As<float>(),
                      decay.As<float>(), beta.As<float>(), after.As<float>(), y.As<float>()}, pool);
}

struct Kernel {
  const char* name;  // of the composite
  void (*run)(Call& call, const Pool& pool);
  Spent& spent;
};
constexpr Kernel all_kernels[] = {{"linear", Linear, linear_spent},
                                  {"attention", Attention, attention_spent},
                                  {"paged_attention", PagedAttention, attention_spent},
                                  {"attend_to", AttendTo, memory_spent},
                                  {"sample", Sample, sample_spent},
                                  {"put_rows", PutRows, rows_spent},
                                  {"cut", Cut, rows_spent},
                                  {"with_tokens", WithTokens, rows_spent},
                                  {"advance", Advance, rows_spent},
                                  {"layer_norm", LayerNorm, norm_spent},
                                  {"rms_norm", RmsNorm, norm_spent},
                                  {"lora", Lora, lora_spent},
                                  {"short_convolution", ShortConvolution, states_spent},
                                  {"gated_delta_rule", LinearAttention<&Kernels::gated_delta_rule>, states_spent},
                                  {"selective_scan", LinearAttention<&Kernels::selective_scan>, states_spent}};

template <size_t kNumber>
ffi::Error Run(ffi::ThreadPool threads, ffi::RemainingArgs operands, ffi::RemainingRets results,
               ffi::Dictionary attributes) {
  const Kernel& kernel = all_kernels[kNumber];
  const Counted counted(kernel.spent);
  try {
    Call call(kernel.name, operands, results, attributes);
    kernel.run(call, PoolOf(threads));
  } catch (const Refused& refused) {
    return ffi::Error::InvalidArgument(refused.what());
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, std::string(kernel.name) + ": there is no memory for it");
  }
  return ffi::Error::Success();
}

template <size_t kNumber>
XLA_FFI_Error* Handle(XLA_FFI_CallFrame* frame) {
  static const auto* handler =
      ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs().To(Run<kNumber>).release();
  return handler->Call(frame);
}

template <size_t... kNumbers>
std::vector<Handler> HandlersOf(std::index_sequence<kNumbers...>) {
  return {{all_kernels[kNumbers].name, Handle<kNumbers>}...};
}

}  // namespace

std::vector<Handler> Handlers() { return HandlersOf(std::make_index_sequence<std::size(all_kernels)>()); }

std::vector<const Spent*> AllSpent() {
  return {&linear_spent, &attention_spent, &memory_spent, &sample_spent,
          &rows_spent,   &norm_spent,      &lora_spent,   &states_spent};
}

void SetLevel(const Kernels& wanted) { level = &wanted; }

}  // namespace neuronx
