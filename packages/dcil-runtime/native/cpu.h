// What this CPU and its operating system support.
#pragma once

namespace dcil {

struct Cpu {
  bool avx2 = false, avx512 = false;      // with FMA; avx512: F, VL, DQ and BW
  bool avx512_vnni = false, avx_vnni = false;  // avx512_vnni: with VBMI
  bool neon = false, dot_product = false;      // every 64-bit ARM has NEON; dot_product: of bytes
};

const Cpu& this_cpu();

}  // namespace dcil
