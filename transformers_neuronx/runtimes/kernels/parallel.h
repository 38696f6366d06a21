// Divides work over the threads of a pool, which is XLA's own.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

namespace neuronx {

// Runs body(piece) for every piece of [0, pieces) on this thread, and on threads of the pool that start before all
// pieces are taken. It does not wait for threads to start: the pool may run tasks late, or one after the other. A
// thread takes several adjacent pieces, since pieces of weights are one stream of memory. It takes fewer when fewer are
// left.
template <typename Threads, typename Body>
void Parallel(Threads& pool, int64_t pieces, const Body& body) {
  struct Counts {
    std::atomic<int64_t> taken{0}, done{0};
  };
  const int64_t helpers = pieces > 1 ? std::min<int64_t>(pool.num_threads(), pieces) - 1 : 0;
  auto counts = std::make_shared<Counts>();  // for a helper that starts late, after this has returned
  auto work = [counts, pieces, helpers, &body] {
    for (int64_t first = 0; first < pieces;) {
      const int64_t next = first + std::max<int64_t>((pieces - first) / (2 * (helpers + 1)), 1);
      if (!counts->taken.compare_exchange_weak(first, next, std::memory_order_relaxed)) continue;
      for (int64_t piece = first; piece < next; ++piece) body(piece);
      counts->done.fetch_add(next - first, std::memory_order_release);
      first = next;
    }
  };
  for (int64_t helper = 0; helper < helpers; ++helper) pool.Schedule([work] { work(); });
  work();
  // A piece takes microseconds, unless its thread has lost its processor, perhaps to this thread.
  for (int turns = 0; counts->done.load(std::memory_order_acquire) < pieces; ++turns) {
    if (turns > 1000) std::this_thread::yield();
  }
}

}  // namespace neuronx
