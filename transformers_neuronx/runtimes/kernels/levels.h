// The instruction-set levels. NEURONX_HAS_… is defined for each one that was compiled.
#pragma once

#include <vector>

#include "kernels.h"

#if defined(NEURONX_HAS_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace neuronx {

#if defined(NEURONX_HAS_AMX)
// Whether the processor has tiles, and Linux lets this process use them, which must be requested. The permission is for
// all threads, including those that already run.
inline bool TilesAllowed() {
  constexpr unsigned kTiles = 1u << 24, kProducts = 1u << 22;  // of bf16
  constexpr long kRequest = 0x1023, kTileData = 18;            // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && d & kTiles && d & kProducts &&
         syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}
#endif

// The levels that were compiled and that this processor supports, the best one last.
inline std::vector<const Kernels*> Levels() {
  std::vector<const Kernels*> levels;
#if defined(NEURONX_HAS_PORTABLE)
  levels.push_back(&portable::kernels);
#endif
#ifdef __x86_64__
  __builtin_cpu_init();
  [[maybe_unused]] const bool avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  [[maybe_unused]] const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                                       __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  [[maybe_unused]] const bool bf16 =
      avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni") &&
      __builtin_cpu_supports("avx512vbmi");
#if defined(NEURONX_HAS_AVX2)
  if (avx2) levels.push_back(&avx2::kernels);
#endif
#if defined(NEURONX_HAS_AVX512)
  if (avx512) levels.push_back(&avx512::kernels);
#endif
#if defined(NEURONX_HAS_AVX512_BF16)
  if (bf16) levels.push_back(&avx512_bf16::kernels);
#endif
#if defined(NEURONX_HAS_AMX)
  if (bf16 && TilesAllowed()) levels.push_back(&amx::kernels);
#endif
#endif
  return levels;
}

}  // namespace neuronx
