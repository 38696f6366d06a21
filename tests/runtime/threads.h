// A pool of threads as XLA has one: tasks run when a thread is free.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <queue>
#include <thread>
#include <utility>
#include <vector>

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
