// Every kernel at every level of instructions that the processor has, on memory of just the size that it may touch, by
// threads that come late: for AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer. What comes out is held
// against NumPy elsewhere; here the levels have to agree with each other.
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <mutex>
#include <queue>
#include <random>
#include <thread>
#include <vector>

#include "kernels.h"
#include "parallel.h"

using namespace neuronx;

namespace {

class Threads {
 public:
  explicit Threads(int count) {
    for (int i = 0; i < count; ++i) workers_.emplace_back([this] { Work(); });
  }
  ~Threads() {
    for (size_t i = 0; i < workers_.size(); ++i) Schedule(nullptr);
    for (auto& worker : workers_) worker.join();
  }
  int64_t num_threads() const { return static_cast<int64_t>(workers_.size()); }
  void Schedule(std::function<void()> task) {
    std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push(std::move(task));
    ready_.notify_one();
  }

 private:
  void Work() {
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex_);
      ready_.wait(lock, [this] { return !tasks_.empty(); });
      auto task = std::move(tasks_.front());
      tasks_.pop();
      lock.unlock();
      if (!task) return;
      task();
    }
  }
  std::mutex mutex_;
  std::condition_variable ready_;
  std::queue<std::function<void()>> tasks_;
  std::vector<std::thread> workers_;
};

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
    const auto bits = reinterpret_cast<const uint32_t&>(value);
    const auto bf16 = static_cast<uint16_t>(bits >> 16);
    const auto f16 = static_cast<uint16_t>(0x3c00 - Below(0x1000) + (Below(2) << 15));
    const auto byte = static_cast<uint8_t>(Below(255) - 127);
    if (type == Type::kF32) reinterpret_cast<float*>(bytes.data())[i] = value;
    else if (size == 2) reinterpret_cast<uint16_t*>(bytes.data())[i] = type == Type::kBF16 ? bf16 : f16;
    else bytes[i] = static_cast<char>(byte);
  }
  return bytes;
}

template <typename T>
T* As(std::vector<char>& bytes) { return reinterpret_cast<T*>(bytes.data()); }

void Agree(const char* what, const std::vector<float>& got, std::vector<float>& wanted) {
  if (wanted.empty()) wanted = got;
  for (size_t i = 0; i < got.size(); ++i) {
    if (!(std::fabs(got[i] - wanted[i]) <= 1e-2f * (1 + std::fabs(wanted[i])))) {
      std::fprintf(stderr, "%s: %g at %zu where another level has %g\n", what, got[i], i, wanted[i]);
      std::exit(1);
    }
  }
}

void Linear(const std::vector<const Kernels*>& levels, Type x_type, Type type, int64_t rows, int64_t outputs,
            int64_t inputs, int64_t group) {
  auto x = Numbers(x_type, rows * inputs), weight = Numbers(type, outputs * inputs / (group ? 2 : 1));
  auto scale = Numbers(Type::kF32, outputs * (group ? inputs / group : 1));
  const bool scaled = type == Type::kS8 || type == Type::kS4;
  std::vector<float> wanted;
  for (const Kernels* level : levels) {
    std::vector<float> y(rows * outputs, NAN);
    LinearArguments arguments = {rows, inputs, outputs, group, x_type, type, x.data(), weight.data(),
                                 scaled ? As<float>(scale) : nullptr, y.data(), nullptr};
    void* scratch = std::aligned_alloc(64, (level->linear_scratch(arguments) + 63) / 64 * 64);
    arguments.scratch = scratch;
    level->linear(arguments, PoolOfThreads());
    std::free(scratch);
    Agree("linear", y, wanted);
  }
}

void Attend(const std::vector<const Kernels*>& levels, Type type, Type cached, int64_t tokens, int64_t size) {
  const int64_t rows = 2, kv_heads = 2, heads = kv_heads * (1 + Below(3)), slots = 3, positions = tokens + Below(90);
  const int64_t count = rows * tokens * size, window = Below(2) * (1 + Below(40));
  auto q = Numbers(type, count * heads), k = Numbers(type, count * kv_heads), v = Numbers(type, count * kv_heads);
  const auto keys = Numbers(cached, slots * kv_heads * positions * size);
  const auto scales = Numbers(Type::kF32, slots * kv_heads * positions);
  auto slopes = Numbers(Type::kF32, heads);
  const int32_t length[] = {static_cast<int32_t>(tokens), static_cast<int32_t>(Below(tokens + 1))};
  const float softcap = Below(2) ? 2.0f : 0;
  int32_t start[2], slot[] = {2, 0};
  for (int row = 0; row < 2; ++row) start[row] = static_cast<int32_t>(Below(positions - length[row] + 1));
  std::vector<float> wanted;
  for (const Kernels* level : levels) {
    auto own_keys = keys, own_values = keys, key_scales = scales, value_scales = scales;
    std::vector<char> context(q.size());
    level->attention({rows, tokens, heads, kv_heads, size, slots, positions, window, 0.3f, softcap, type, cached,
                      q.data(), k.data(), v.data(), start, length, slot, As<float>(slopes), own_keys.data(),
                      own_values.data(), As<float>(key_scales), As<float>(value_scales), context.data()},
                     PoolOfThreads());
    if (type != Type::kF32) continue;
    Agree("attention", std::vector<float>(As<float>(context), As<float>(context) + count * heads), wanted);
  }
}

}  // namespace

int main() {
  std::vector<const Kernels*> levels = {&portable::kernels};
#ifdef __x86_64__
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) levels.push_back(&avx2::kernels);
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq")) levels.push_back(&avx512::kernels);
  const bool bf16 = __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
  if (bf16) levels.push_back(&avx512_bf16::kernels);
#endif
  const Type wide[] = {Type::kF32, Type::kBF16, Type::kF16};
  for (const int64_t rows : {1, 2, 3, 4, 7, 17})
    for (const int64_t inputs : {1, 31, 64, 129, 1000})
      for (const int64_t outputs : {1, 6, 70}) {
        for (const Type type : wide) Linear(levels, type, type, rows, outputs, inputs, 0);
        Linear(levels, Type::kBF16, Type::kS8, rows, outputs, inputs, 0);
        Linear(levels, Type::kF16, Type::kS8, rows, outputs, inputs, 0);
      }
  for (const int64_t rows : {1, 2, 5, 17})
    for (const int64_t groups : {1, 3, 9})
      for (const int64_t group : {32, 64, 256}) Linear(levels, Type::kBF16, Type::kS4, rows, 7, groups * group, group);
  for (const int64_t tokens : {1, 2, 3, 9, 40})
    for (const int64_t size : {1, 16, 20, 64, 80, 256})
      for (const Type type : wide) {
        Attend(levels, type, type, tokens, size);
        Attend(levels, type, Type::kS8, tokens, size);
      }
  std::printf("%zu levels\n", levels.size());
}
