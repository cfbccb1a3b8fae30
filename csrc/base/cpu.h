// The instruction sets that this processor has and the kernel lets programs use, for code that chooses a loop by them.
// By CPUID: the compiler's own question is answered "none" in a wheel, by a stub in zig's library.
//
// Thread safety: all functions.
#pragma once

#if defined(__x86_64__)

#include <cpuid.h>

namespace kvdock {

struct Cpu {
  bool sse42 = false;
  bool avx2 = false;    // with BMI1
  bool avx512 = false;  // F, BW, VL, VBMI and VBMI2
};

inline Cpu detect_cpu() {
  Cpu cpu;
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return cpu;
  cpu.sse42 = c & bit_SSE4_2;
  const bool saved = c & bit_OSXSAVE;
  if (!saved || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return cpu;
  unsigned kept, upper;  // registers that the kernel keeps for each thread: bits 1 and 2 for AVX, 5 to 7 for AVX-512
  __asm__ volatile("xgetbv" : "=a"(kept), "=d"(upper) : "c"(0));
  cpu.avx2 = (kept & 0x06) == 0x06 && b & bit_AVX2 && b & bit_BMI;
  const bool foundation = b & bit_AVX512F && b & bit_AVX512BW && b & bit_AVX512VL;
  cpu.avx512 = (kept & 0xe6) == 0xe6 && foundation && c & bit_AVX512VBMI && c & bit_AVX512VBMI2;
  return cpu;
}

inline const Cpu& cpu() {
  static const Cpu found = detect_cpu();
  return found;
}

}  // namespace kvdock

#endif
