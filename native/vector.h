// One vector of LANES floats, in the compiler's own vector types: the same source serves every instruction set.
//
// Included only by kernels.cpp, which is compiled once per instruction set with its own LANES, ISA and flags. Nothing
// here may have external linkage outside namespace ISA, or the linker could pick a copy the CPU cannot run.
#pragma once
#include <cstdint>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace ISA {

// A vector may stand for the floats it covers (both compilers say so), but for nothing else: with `may_alias` every
// store would make the kernels read their arguments again.
typedef float V __attribute__((vector_size(LANES * 4)));
typedef int32_t VI __attribute__((vector_size(LANES * 4)));
typedef float VU __attribute__((vector_size(LANES * 4), aligned(4)));  // may start anywhere

#define INLINE static inline __attribute__((always_inline))

INLINE V splat(float x) { return x - V{}; }
INLINE V load(const float* p) { return *reinterpret_cast<const V*>(p); }
INLINE V load_anywhere(const float* p) { return *reinterpret_cast<const VU*>(p); }
INLINE void store(float* p, V v) { *reinterpret_cast<V*>(p) = v; }
INLINE V larger(V a, V b) { return a > b ? a : b; }    // b where either is NaN, as the maxps instruction
INLINE V smaller(V a, V b) { return a < b ? a : b; }

/// Lanes of `v` in the order `from`; a negative entry gives 0.
INLINE V permute(V v, VI from) {
#if defined(__AVX512F__)
  const __mmask16 some = _mm512_cmpge_epi32_mask((__m512i)from, _mm512_setzero_si512());
  return (V)_mm512_maskz_permutexvar_ps(some, (__m512i)from, (__m512)v);
#elif defined(__clang__)
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
