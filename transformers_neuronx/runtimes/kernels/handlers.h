// What the library offers to XLA and to Python.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "kernels.h"
#include "xla/ffi/api/c_api.h"

namespace neuronx {

struct Handler {
  const char* name;  // of the composite
  XLA_FFI_Handler* handle;
};

// Calls of a kernel since the library was loaded, and how long they took.
struct Spent {
  const char* name;
  std::atomic<int64_t> calls{0}, nanoseconds{0};
};

std::vector<Handler> Handlers();
std::vector<const Spent*> AllSpent();

// Calls use the kernels of this level from now on. There must be one before the first call.
void SetLevel(const Kernels& wanted);

}  // namespace neuronx
