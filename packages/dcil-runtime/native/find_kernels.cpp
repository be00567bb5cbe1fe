// Which kernels this CPU runs.
#include <cstring>

#include "kernels.h"

namespace dcil {

const KernelSet* find_kernels(const char* name) {
  const bool any = !name || !*name;
  const auto asked = [&](const char* set) { return any || std::strcmp(name, set) == 0; };
#ifdef DCIL_X86
  __builtin_cpu_init();
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw");
  if (asked("avx512") && avx512) return &kernels_avx512();
  if (asked("avx2") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return &kernels_avx2();
#endif
  if (asked("portable")) return &kernels_portable();
  return std::strcmp(name, "wide") == 0 ? &kernels_wide() : nullptr;
}

}  // namespace dcil
