// Which levels of instructions there are.
#pragma once

#include <vector>

#include "kernels.h"

#if defined(NEURONX_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace neuronx {

#if defined(NEURONX_AMX)
// Whether the processor has tiles, and Linux lets this process use them: it has to be asked. What it says holds for all
// threads, those that are there already as well.
inline bool TilesAllowed() {
  constexpr unsigned kTiles = 1u << 24, kProducts = 1u << 22;  // of bf16
  constexpr long kRequest = 0x1023, kTileData = 18;            // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && d & kTiles && d & kProducts &&
         syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}
#endif

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
#if defined(NEURONX_AMX)
  if (bf16 && TilesAllowed()) levels.push_back(&amx::kernels);
#endif
#endif
  return levels;
}

}  // namespace neuronx
