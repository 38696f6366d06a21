// Which levels of instructions there are.
#pragma once

#include <vector>

#include "kernels.h"

namespace neuronx {

// Levels that this processor has, the best one last.
inline std::vector<const Kernels*> Levels() {
  std::vector<const Kernels*> levels = {&portable::kernels};
#ifdef __x86_64__
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
  if (avx2) levels.push_back(&avx2::kernels);
  if (avx512) levels.push_back(&avx512::kernels);
  if (bf16) levels.push_back(&avx512_bf16::kernels);
#endif
  return levels;
}

}  // namespace neuronx
