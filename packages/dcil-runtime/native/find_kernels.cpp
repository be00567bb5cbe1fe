// Which kernels this CPU runs.
#include <cstring>

#include "cpu.h"
#include "kernels.h"

namespace dcil {

const KernelSet* find_kernels(const char* name) {
  const bool any = !name || !*name;
  const auto asked = [&](const char* set) { return any || std::strcmp(name, set) == 0; };
#ifdef DCIL_X86
  if (asked("avx512") && this_cpu().avx512) return &kernels_avx512();
  if (asked("avx2") && this_cpu().avx2) return &kernels_avx2();
#endif
#ifdef DCIL_ARM
  if (asked("neon") && this_cpu().neon) return &kernels_neon();
#endif
  if (asked("portable")) return &kernels_portable();
  return std::strcmp(name, "wide") == 0 ? &kernels_wide() : nullptr;
}

}  // namespace dcil
