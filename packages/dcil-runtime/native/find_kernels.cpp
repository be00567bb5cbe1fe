// Which kernels this CPU runs.
#include <cstring>

#include "cpu.h"
#include "quant_kernels.h"

namespace dcil {

namespace {

KernelSet with(KernelSet set, const QuantKernels& quant, const char* name) {
  set.quant = &quant;
  set.name = name;
  return set;
}

}  // namespace

/// "…-plain": without dot products of bytes, so that a CPU that has them can be tested like one that has not.
const KernelSet* find_kernels(const char* name) {
  const bool any = !name || !*name;
  const auto asked = [&](const char* set) { return any || std::strcmp(name, set) == 0; };
#ifdef DCIL_X86
  const Cpu& cpu = this_cpu();
  static const KernelSet avx512_plain = with(kernels_avx512(), quant_kernels_avx512(), "avx512-plain");
  static const KernelSet avx512 = with(
      kernels_avx512(), cpu.avx512_vnni ? quant_kernels_avx512vnni() : quant_kernels_avx512(), "avx512");
  static const KernelSet avx2_plain = with(kernels_avx2(), quant_kernels_avx2(), "avx2-plain");
  static const KernelSet avx2 = with(
      kernels_avx2(), cpu.avx_vnni ? quant_kernels_avxvnni() : quant_kernels_avx2(), "avx2");
  if (asked("avx512") && cpu.avx512) return &avx512;
  if (asked("avx2") && cpu.avx2) return &avx2;
  if (!any && asked("avx512-plain") && cpu.avx512) return &avx512_plain;
  if (!any && asked("avx2-plain") && cpu.avx2) return &avx2_plain;
#endif
#ifdef DCIL_ARM
  const Cpu& cpu = this_cpu();
  static const KernelSet neon_plain = with(kernels_neon(), quant_kernels_neon(), "neon-plain");
  static const KernelSet neon = with(
      kernels_neon(), cpu.dot_product ? quant_kernels_neondot() : quant_kernels_neon(), "neon");
  if (asked("neon") && cpu.neon) return &neon;
  if (!any && asked("neon-plain") && cpu.neon) return &neon_plain;
#endif
  static const KernelSet portable = with(kernels_portable(), quant_kernels_portable(), "portable");
  static const KernelSet wide = with(kernels_wide(), quant_kernels_wide(), "wide");
  if (asked("portable")) return &portable;
  return std::strcmp(name, "wide") == 0 ? &wide : nullptr;
}

}  // namespace dcil
