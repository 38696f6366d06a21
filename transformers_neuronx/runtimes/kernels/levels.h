// The instruction-set levels. NEURONX_HAS_… is defined for each one that was compiled.
#pragma once

#include <vector>

#include "kernels.h"

#ifdef __x86_64__
#include <cpuid.h>
#endif
#if defined(NEURONX_HAS_AMX)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace neuronx {

#if defined(NEURONX_HAS_AMX)
// Whether the processor has tiles, and Linux lets this process use them, which must be requested. The permission is for
// all threads, including those that already run.
inline bool TilesAllowed() {
  constexpr unsigned kTiles = 1u << 24, kBF16 = 1u << 22, kBytes = 1u << 25, kAll = kTiles | kBF16 | kBytes;
  constexpr long kRequest = 0x1023, kTileData = 18;            // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kAll) == kAll &&
         syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}
#endif

#if defined(__aarch64__)
struct OfArm { bool dot, bf16; };

// The products of bytes and of bf16 that the processor has.
inline OfArm FeaturesOfArm() {
#if defined(__linux__)
  constexpr unsigned long kDot = 1ul << 20, kI8MM = 1ul << 13, kBF16 = 1ul << 14;  // HWCAP_ASIMDDP, HWCAP2_I8MM, …_BF16
  const unsigned long more = getauxval(AT_HWCAP2);
  return {(getauxval(AT_HWCAP) & kDot) != 0, (more & kI8MM) != 0 && (more & kBF16) != 0};
#elif defined(__APPLE__)
  const auto has = [](const char* name) {
    int32_t found = 0;
    size_t size = sizeof found;
    return sysctlbyname(name, &found, &size, nullptr, 0) == 0 && found != 0;
  };
  return {has("hw.optional.arm.FEAT_DotProd"),
          has("hw.optional.arm.FEAT_BF16") && has("hw.optional.arm.FEAT_I8MM")};
#else
  return {};
#endif
}
#endif

#ifdef __x86_64__
// Clang's __builtin_cpu_supports does not know it.
inline bool HasF16C() {
  unsigned a, b, c = 0, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
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
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && HasF16C();
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
#elif defined(__aarch64__)
  [[maybe_unused]] const OfArm has = FeaturesOfArm();
#if defined(NEURONX_HAS_NEON_DOT)
  if (has.dot) levels.push_back(&neon_dot::kernels);
#endif
#if defined(NEURONX_HAS_NEON_BF16)
  if (has.dot && has.bf16) levels.push_back(&neon_bf16::kernels);
#endif
#endif
  return levels;
}

}  // namespace neuronx
