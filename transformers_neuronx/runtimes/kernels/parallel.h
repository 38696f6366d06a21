// Work divided over the threads of a pool, which is XLA's own.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

namespace neuronx {

// body(piece) for every piece of [0, pieces), on this thread and on those of the pool that come by before all are
// taken. It waits for no thread to come: the pool may run tasks late, or one after the other. A thread takes some
// pieces in a row, since those of weights are one stream of memory, and fewer the fewer are left.
template <typename Threads, typename Body>
void Parallel(Threads& pool, int64_t pieces, const Body& body) {
  struct Counts {
    std::atomic<int64_t> taken{0}, done{0};
  };
  const int64_t helpers = pieces > 1 ? std::min<int64_t>(pool.num_threads(), pieces) - 1 : 0;
  auto counts = std::make_shared<Counts>();  // of a helper that comes late, when this has returned
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
  // A piece takes microseconds, unless its thread has lost its processor: then that may be this one's.
  for (int turns = 0; counts->done.load(std::memory_order_acquire) < pieces; ++turns) {
    if (turns > 1000) std::this_thread::yield();
  }
}

}  // namespace neuronx
