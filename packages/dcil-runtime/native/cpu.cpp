// Read from the CPU itself: the compilers' own tables differ in what they know and in where their linkers find them.
#include "cpu.h"

#ifdef DCIL_X86
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace dcil {

namespace {

#ifdef DCIL_X86

/// The registers that the operating system saves for every thread (XCR0).
unsigned saved_registers() {
  unsigned low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

Cpu detect() {
  Cpu cpu;
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return cpu;
  const auto bit = [](unsigned value, int place) { return (value >> place & 1) != 0; };
  const bool fma = bit(c, 12), osxsave = bit(c, 27);
  if (!osxsave || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return cpu;
  const unsigned saved = saved_registers();
  const bool ymm = (saved & 0x06) == 0x06, zmm = (saved & 0xe6) == 0xe6;
  cpu.avx2 = ymm && fma && bit(b, 5);
  cpu.avx512 = zmm && fma && bit(b, 16) && bit(b, 17) && bit(b, 30) && bit(b, 31);  // F, DQ, BW, VL
  cpu.avx512_vnni = cpu.avx512 && bit(c, 11) && bit(c, 1);
  cpu.avx_vnni = cpu.avx2 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && bit(a, 4);
  return cpu;
}

#elif defined(__aarch64__)

Cpu detect() {
  Cpu cpu;
  cpu.neon = true;
#ifdef __linux__
  constexpr unsigned long asimddp = 1 << 20;  // HWCAP_ASIMDDP, which old headers lack
  cpu.dot_product = (getauxval(AT_HWCAP) & asimddp) != 0;
#endif
  return cpu;
}

#else

Cpu detect() { return {}; }

#endif

}  // namespace

const Cpu& this_cpu() {
  static const Cpu cpu = detect();
  return cpu;
}

}  // namespace dcil
