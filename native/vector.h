// One vector of LANES floats, in the compiler's own vector types: the same source serves every instruction set.
//
// Included only by kernels.cpp, which is compiled once per instruction set with its own LANES, ISA and flags. Nothing
// here may have external linkage outside namespace ISA, or the linker could pick a copy the CPU cannot run.
#pragma once
#include <cstdint>

namespace ISA {

typedef float V __attribute__((vector_size(LANES * 4), may_alias));
typedef int32_t VI __attribute__((vector_size(LANES * 4), may_alias));
typedef float VU __attribute__((vector_size(LANES * 4), may_alias, aligned(4)));  // may start anywhere

#define INLINE static inline __attribute__((always_inline))

INLINE V splat(float x) { return x - V{}; }
INLINE V load(const float* p) { return *reinterpret_cast<const V*>(p); }
INLINE V load_anywhere(const float* p) { return *reinterpret_cast<const VU*>(p); }
INLINE void store(float* p, V v) { *reinterpret_cast<V*>(p) = v; }
INLINE V larger(V a, V b) { return a > b ? a : b; }    // b where either is NaN, as the maxps instruction
INLINE V smaller(V a, V b) { return a < b ? a : b; }

/// Lanes of `v` in the order `from`; a negative entry gives 0.
INLINE V permute(V v, VI from) {
#if defined(__clang__)
  V r = {};
  for (int l = 0; l < LANES; l++) r[l] = from[l] < 0 ? 0.0f : v[from[l]];
  return r;
#else
  V moved = __builtin_shuffle(v, from & (LANES - 1));
  return (V)((VI)moved & ~(from >> 31));
#endif
}

INLINE float sum(V v) {
  float s = 0;
  for (int l = 0; l < LANES; l++) s += v[l];
  return s;
}

}  // namespace ISA
