// Every kernel at every level of instructions that the processor has, on memory of just the size that it may touch, by
// threads that come late: for AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer. What comes out is held
// against NumPy elsewhere; here the levels have to agree with each other.
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include "kernels.h"
#include "levels.h"
#include "parallel.h"
#include "threads.h"

using namespace neuronx;

namespace {

Threads threads(3);

Pool PoolOfThreads() {
  const auto run = [](void*, int64_t pieces, void (*body)(void*, int64_t), void* context) {
    Parallel(threads, pieces, [&](int64_t piece) { body(context, piece); });
  };
  return {run, nullptr};
}

std::mt19937 random_bits(0);

int64_t Below(int64_t limit) { return static_cast<int64_t>(random_bits() % static_cast<uint64_t>(limit)); }

// `count` numbers of a type, between -1 and 1, or of few bits.
std::vector<char> Numbers(Type type, int64_t count) {
  const int64_t size = type == Type::kF32 ? 4 : type == Type::kBF16 || type == Type::kF16 ? 2 : 1;
  std::vector<char> bytes(count * size);
  for (int64_t i = 0; i < count; ++i) {
    const float value = static_cast<float>(Below(2001) - 1000) / 1000;
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    const auto bf16 = static_cast<uint16_t>(bits >> 16);
    const auto f16 = static_cast<uint16_t>(0x3c00 - Below(0x1000) + (Below(2) << 15));
    const auto byte = static_cast<uint8_t>(type == Type::kF8 ? Below(256) & 0xbf : Below(255) - 127);  // no NaN
    if (type == Type::kF32) reinterpret_cast<float*>(bytes.data())[i] = value;
    else if (size == 2) reinterpret_cast<uint16_t*>(bytes.data())[i] = type == Type::kBF16 ? bf16 : f16;
    else bytes[i] = static_cast<char>(byte);
  }
  return bytes;
}

template <typename T>
T* As(std::vector<char>& bytes) { return reinterpret_cast<T*>(bytes.data()); }

// Within a thousandth of the largest.
void Agree(const char* what, const std::vector<float>& got, std::vector<float>& wanted) {
  if (wanted.empty()) wanted = got;
  float largest = 1;
  for (const float each : wanted) largest = std::fmax(largest, std::fabs(each));
  for (size_t i = 0; i < got.size(); ++i) {
    if (!(std::fabs(got[i] - wanted[i]) <= 1e-3f * largest)) {
      std::fprintf(stderr, "%s: %g at %zu where another level has %g\n", what, got[i], i, wanted[i]);
      std::exit(1);
    }
  }
}

void Linear(const std::vector<const Kernels*>& levels, Type x_type, Type type, int64_t rows, int64_t outputs,
            int64_t inputs, int64_t group) {
  const Type y_type = Below(2) ? Type::kF32 : x_type;
  const int parts = 1 + static_cast<int>(Below(kMostParts));
  const auto activation = parts < 3 ? static_cast<Activation>(Below(6)) : Activation::kNone;
  const int64_t bits = type == Type::kS5 ? 5 : type == Type::kS6 ? 6 : type == Type::kS8 || type == Type::kF8 ? 8 : 4;
  const bool coded = type == Type::kE2M1 || type == Type::kNF4 || type == Type::kFP4, biased = Below(2);
  const bool whole = type == Type::kS4 || type == Type::kS5 || type == Type::kS6 || type == Type::kS8;
  const bool scaled = whole || coded || type == Type::kF8;
  const Type scale_type = group ? std::array{Type::kF32, Type::kBF16, Type::kF16}[Below(3)] : Type::kF32;
  const bool minima = whole && group && Below(2), two_levels = whole && group && Below(2);
  const int64_t groups = group ? inputs / group : 0, blocks = groups % 3 ? 1 : groups / 3;
  const int64_t rounded = whole && Below(2) ? (group ? group : 32) : 0;
  auto x = Numbers(x_type, rows * inputs);
  std::vector<char> weights[kMostParts], scales[kMostParts], least[kMostParts], units[kMostParts], biases[kMostParts];
  for (int part = 0; part < parts; ++part) {
    const int64_t panels = (outputs + 15) / 16, size = scaled ? 1 : type == Type::kF32 ? 4 : 2;
    const int64_t word = type == Type::kF16 ? 1 : 4 / size, stored = scaled ? inputs * bits / 8 : inputs;
    weights[part] = Numbers(type, panels * 16 * ((stored + word - 1) / word) * word);
    scales[part] = Numbers(two_levels ? Type::kS8 : scale_type, group ? panels * 16 * groups : outputs);
    least[part] = Numbers(two_levels ? Type::kS8 : scale_type, panels * 16 * groups);
    units[part] = Numbers(scale_type, panels * 16 * blocks);
    biases[part] = Numbers(x_type, outputs);
  }
  const int64_t x_row = inputs * (x_type == Type::kF32 ? 4 : 2), y_row = outputs * (y_type == Type::kF32 ? 4 : 2);
  const int64_t first = Below(rows);  // rows of the first of two products, which are computed together
  std::vector<float> wanted;
  for (const Kernels* level : levels) {
    std::vector<char> y[kMostParts];
    LinearArguments arguments = {rows,   inputs, group,      two_levels ? inputs / blocks : 0, rounded,  x_type, type,
                                 scale_type, y_type, activation, parts, x.data(), {}, nullptr};
    for (int part = 0; part < parts; ++part) {
      y[part].resize(rows * y_row);
      arguments.weights[part] = {outputs, weights[part].data(), scaled ? scales[part].data() : nullptr,
                                 minima ? least[part].data() : nullptr, two_levels ? units[part].data() : nullptr,
                                 two_levels && minima ? units[part].data() : nullptr,
                                 biased ? biases[part].data() : nullptr, y[part].data()};
    }
    std::vector<LinearArguments> products;
    for (const auto& [from, to] : {std::pair{int64_t{0}, first}, {first, rows}}) {
      if (from == to) continue;
      LinearArguments own = arguments;
      own.rows = to - from;
      own.x = x.data() + from * x_row;
      for (int part = 0; part < parts; ++part) own.weights[part].y = y[part].data() + from * y_row;
      own.scratch = std::aligned_alloc(64, (level->linear_scratch(own) + 63) / 64 * 64);
      products.push_back(own);
    }
    level->linear(products.data(), products.size(), PoolOfThreads());
    for (const auto& product : products) std::free(product.scratch);
    if (y_type != Type::kF32) continue;
    Agree("linear", std::vector<float>(As<float>(y[0]), As<float>(y[0]) + rows * outputs), wanted);
  }
}

void Normalize(const std::vector<const Kernels*>& levels, Type type, int64_t rows, int64_t size) {
  auto x = Numbers(type, rows * size), weight = Numbers(Type::kF32, size), bias = Numbers(Type::kF32, size);
  const bool biased = Below(2);
  std::vector<float> wanted;
  for (const Kernels* level : levels) {
    std::vector<char> y(x.size());
    level->normalize({rows, size, 1e-2f, type, x.data(), As<float>(weight), biased ? As<float>(bias) : nullptr, y.data()},
                     PoolOfThreads());
    if (type == Type::kF32) Agree("norm", std::vector<float>(As<float>(y), As<float>(y) + rows * size), wanted);
  }
}

void AddAdapters(const std::vector<const Kernels*>& levels, Type type, int64_t rows, int64_t outputs, int64_t inputs) {
  const int64_t count = 1 + Below(3), rank = 1 + Below(20), together = 1 + Below(3);
  const Type y_type = Below(2) ? Type::kF32 : type;
  auto x = Numbers(type, rows * together * inputs), y = Numbers(y_type, rows * together * outputs);
  auto a = Numbers(type, count * rank * inputs), b = Numbers(type, count * rank * outputs);
  std::vector<int32_t> adapter(rows);
  for (auto& each : adapter) each = static_cast<int32_t>(Below(count + 2) - 1);
  std::vector<float> wanted;
  for (const Kernels* level : levels) {
    auto own = y;
    LoraArguments arguments = {rows * together, together, inputs,   outputs,  count,          rank,       type,
                               y_type,          x.data(), a.data(), b.data(), adapter.data(), own.data(), nullptr};
    std::vector<char> scratch(level->lora_scratch(arguments));
    arguments.scratch = scratch.data();
    level->add_adapters(arguments, PoolOfThreads());
    if (y_type != Type::kF32) continue;
    Agree("adapters", std::vector<float>(As<float>(own), As<float>(own) + rows * together * outputs), wanted);
  }
}

void Sample(const std::vector<const Kernels*>& levels, int64_t rows, int64_t vocabulary) {
  auto logits = Numbers(Type::kF32, rows * vocabulary), seen = Numbers(Type::kS8, rows * vocabulary);
  std::vector<int32_t> policy(rows * kPolicyColumns), position(rows);
  for (int64_t row = 0; row < rows; ++row) {
    const float rules[] = {0.5f, Below(2) ? 1.0f : 0.8f, Below(2) ? 0.0f : 0.1f, Below(2) ? 1.0f : 1.5f};
    int32_t* own = policy.data() + row * kPolicyColumns;
    own[0] = static_cast<int32_t>(Below(vocabulary + 2));
    memcpy(own + 1, rules, sizeof rules);
    own[5] = static_cast<int32_t>(Below(1000));
    own[6] = position[row] = static_cast<int32_t>(row);
  }
  std::vector<float> wanted;
  for (const Kernels* level : levels) {
    std::vector<int32_t> token(rows);
    SampleArguments arguments = {rows, vocabulary, As<float>(logits), As<int8_t>(seen), policy.data(), position.data(),
                                 token.data(), nullptr};
    std::vector<char> scratch(level->sample_scratch(arguments));
    arguments.scratch = scratch.data();
    level->sample(arguments, PoolOfThreads());
    Agree("sample", std::vector<float>(token.begin(), token.end()), wanted);
  }
}

void Attend(const std::vector<const Kernels*>& levels, Type type, Type cached, int64_t tokens, int64_t size) {
  const int64_t rows = 2, kv_heads = 2, heads = kv_heads * (1 + Below(3)), slots = 3, positions = tokens + Below(90);
  const int64_t count = rows * tokens * size, window = Below(2) * (1 + Below(40)), chunk = Below(2) * (1 + Below(40));
  auto q = Numbers(type, count * heads), k = Numbers(type, count * kv_heads), v = Numbers(type, count * kv_heads);
  const auto keys = Numbers(cached, slots * kv_heads * positions * size);
  const auto scales = Numbers(Type::kF32, slots * kv_heads * positions);
  const int64_t distances = Below(2) * (1 + Below(100));
  auto slopes = Numbers(Type::kF32, heads), biases = Numbers(Type::kF32, heads * distances);
  auto sinks = Numbers(Type::kF32, heads);
  const bool with_sinks = Below(2);
  const int32_t length[] = {static_cast<int32_t>(tokens), static_cast<int32_t>(Below(tokens + 1))};
  const float softcap = Below(2) ? 2.0f : 0;
  int32_t start[2], slot[] = {2, 0};
  for (int row = 0; row < 2; ++row) start[row] = static_cast<int32_t>(Below(positions - length[row] + 1));
  std::vector<float> wanted;
  for (const Kernels* level : levels) {
    auto own_keys = keys, own_values = keys, key_scales = scales, value_scales = scales;
    std::vector<char> context(q.size());
    level->attention({rows, tokens, heads, kv_heads, size, slots, positions, 1, 1, window, chunk, distances, 0.3f, softcap,
                      type, cached, q.data(), k.data(), v.data(), start, length, nullptr, slot, nullptr, As<float>(slopes),
                      distances ? As<float>(biases) : nullptr, with_sinks ? As<float>(sinks) : nullptr, own_keys.data(),
                      own_values.data(), As<float>(key_scales), As<float>(value_scales), context.data()},
                     PoolOfThreads());
    if (type != Type::kF32) continue;
    Agree("attention", std::vector<float>(As<float>(context), As<float>(context) + count * heads), wanted);
  }
}

// Three sequences in pages: a prompt, a single token, and three tokens that go on; and two tokens of no sequence.
void AttendOver(const std::vector<const Kernels*>& levels, Type type, Type cached, int64_t tokens, int64_t size) {
  const int64_t kv_heads = 2, heads = kv_heads * (1 + Below(3)), pages = 16, most = 8;
  const int64_t page = kPage << Below(3);
  const int64_t total = tokens + 6, window = Below(2) * (1 + Below(90)), chunk = Below(2) * (1 + Below(90));
  auto sinks = Numbers(Type::kF32, heads);
  auto q = Numbers(type, total * heads * size), k = Numbers(type, total * kv_heads * size);
  auto v = Numbers(type, total * kv_heads * size);
  const auto keys = Numbers(cached, pages * kv_heads * page * size);
  const auto scales = Numbers(Type::kF32, pages * kv_heads * page);
  const auto count = static_cast<int32_t>(tokens);
  const int32_t rows[3][kRowColumns + most] = {{0, count, 0, 1, 5, 4, 12, -1, -1, -1, -1, -1},
                                               {count, 1, 70, 0, 7, 1, 0, 3, 8, -1, -1, -1},
                                               {count + 1, 3, 126, 0, 2, 6, 13, 14, 9, 15, 10, 11}};
  std::vector<float> wanted;
  for (const Kernels* level : levels) {
    auto own_keys = keys, own_values = keys, key_scales = scales, value_scales = scales;
    std::vector<char> context(q.size());
    const int32_t* row = rows[0];
    level->attention({3, total, heads, kv_heads, size, pages, page, most, kRowColumns + most, window, chunk, 0, 0.3f, 0, type,
                      cached, q.data(), k.data(), v.data(), row + 2, row + 1, row, row + kRowColumns, row + 3, nullptr,
                      nullptr, As<float>(sinks), own_keys.data(), own_values.data(), As<float>(key_scales), As<float>(value_scales),
                      context.data()},
                     PoolOfThreads());
    if (type != Type::kF32) continue;
    const auto* numbers = As<float>(context);
    Agree("attention over pages", std::vector<float>(numbers, numbers + total * heads * size), wanted);
  }
}

void AttendTo(const std::vector<const Kernels*>& levels, Type type, int64_t tokens, int64_t size) {
  const int64_t rows = 2, kv_heads = 1 + Below(2), heads = kv_heads * (1 + Below(3)), positions = 1 + Below(90);
  const int64_t of_head = Below(2) ? positions * tokens : positions, of_token = of_head > positions;
  const int64_t bias_rows = 1 + Below(2), bias_heads = Below(2) ? heads : 1;
  const bool biased = Below(3), chosen = Below(2);
  auto q = Numbers(type, rows * tokens * heads * size), keys = Numbers(type, rows * positions * kv_heads * size);
  auto values = Numbers(type, rows * positions * kv_heads * size);
  auto bias = Numbers(Type::kF32, bias_rows * bias_heads * of_head);
  const int32_t length[] = {static_cast<int32_t>(positions), static_cast<int32_t>(Below(positions + 9) - 4)};
  const int32_t slots[] = {static_cast<int32_t>(Below(4) - 1), 0};
  std::vector<float> wanted;
  for (const Kernels* level : levels) {
    std::vector<char> context(q.size());
    level->attend_to({rows, tokens, heads, kv_heads, size, rows, positions, bias_rows > 1 ? bias_heads * of_head : 0,
                      bias_heads > 1 ? of_head : 0, of_head / positions, of_token, 0.3f, type, q.data(), keys.data(),
                      values.data(), length, chosen ? slots : nullptr, biased ? As<float>(bias) : nullptr, context.data()},
                     PoolOfThreads());
    if (type != Type::kF32) continue;
    const float* first = As<float>(context);
    Agree("attention to a memory", std::vector<float>(first, first + rows * tokens * heads * size), wanted);
  }
}

}  // namespace

int main() {
  const auto levels = Levels();
  const Type wide[] = {Type::kF32, Type::kBF16, Type::kF16};
  for (const int64_t rows : {1, 2, 3, 4, 7, 17, 300})
    for (const int64_t inputs : {1, 31, 64, 129, 1000})
      for (const int64_t outputs : {1, 6, 70}) {
        for (const Type type : wide) Linear(levels, type, type, rows, outputs, inputs, 0);
        for (const Type type : wide)
          for (const Type stored : {Type::kS8, Type::kF8}) Linear(levels, type, stored, rows, outputs, inputs, 0);
      }
  for (const int64_t rows : {1, 2, 5, 17})
    for (const int64_t groups : {1, 3, 9})
      for (const int64_t group : {8, 16, 64, 256})
        for (const Type type : wide)
          for (const Type stored : {Type::kS4, Type::kS5, Type::kS6, Type::kS8, Type::kF8, Type::kE2M1, Type::kNF4,
                                    Type::kFP4})
            if (group >= 32 || (stored != Type::kS5 && stored != Type::kS6))
              Linear(levels, type, stored, rows, 37, groups * group, group);
  for (const int64_t tokens : {1, 2, 3, 9, 40})
    for (const int64_t size : {1, 16, 20, 64, 80, 256})
      for (const Type type : wide) {
        Attend(levels, type, type, tokens, size);
        Attend(levels, type, Type::kS8, tokens, size);
        AttendOver(levels, type, type, tokens, size);
        AttendOver(levels, type, Type::kS8, tokens, size);
        for (int i = 0; i < 4; ++i) AttendTo(levels, type, tokens, size);
      }
  for (const int64_t rows : {1, 9, 33})
    for (const int64_t size : {1, 15, 16, 70, 1000}) {
      for (const Type type : wide) Normalize(levels, type, rows, size);
      for (const Type type : wide) AddAdapters(levels, type, rows, 1 + Below(300), size);
      Sample(levels, rows, size);
    }
  std::printf("%zu levels\n", levels.size());
}
