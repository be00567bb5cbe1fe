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
INLINE V load_some(const float* p, int count) {  // reads no further; 0 in the other lanes
#if defined(__AVX512F__)
  return (V)_mm512_maskz_loadu_ps(__mmask16((1u << count) - 1), p);
#else
  V v = {};
  for (int l = 0; l < count; l++) v[l] = p[l];
  return v;
#endif
}
/// from[index], or fill where the index is negative or not below `limit`.
INLINE V load_each(const float* from, const int32_t* index, int32_t limit, V fill) {
#if defined(__AVX512F__)
  const __m512i at = _mm512_loadu_si512(index);
  const __mmask16 there = _mm512_cmplt_epu32_mask(at, _mm512_set1_epi32(limit));
  return (V)_mm512_mask_i32gather_ps((__m512)fill, there, at, from, 4);
#else
  for (int l = 0; l < LANES; l++)
    if (uint32_t(index[l]) < uint32_t(limit)) fill[l] = from[index[l]];
  return fill;
#endif
}
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

/// Lane l of the result is a[from[l]], or b[from[l] - LANES].
INLINE V pick(V a, V b, VI from) {
#if defined(__clang__)
  V r = {};
  for (int l = 0; l < LANES; l++) r[l] = from[l] < LANES ? a[from[l]] : b[from[l] - LANES];
  return r;
#else
  return __builtin_shuffle(a, b, from);
#endif
}

/// Rows become columns: swaps the blocks beside the diagonal, Half x Half of them, then those within each block.
template <int Half = LANES / 2>
INLINE void transpose(V* rows) {
  VI upper = {}, lower = {};
#pragma GCC unroll 16
  for (int l = 0; l < LANES; l++) {
    upper[l] = l & Half ? LANES + l - Half : l;
    lower[l] = l & Half ? LANES + l : l + Half;
  }
#pragma GCC unroll 16
  for (int i = 0; i < LANES; i++) {
    if (i & Half) continue;
    const V a = rows[i], b = rows[i + Half];
    rows[i] = pick(a, b, upper);
    rows[i + Half] = pick(a, b, lower);
  }
  if constexpr (Half > 1) transpose<Half / 2>(rows);
}

INLINE V sqrt(V v) {
  for (int l = 0; l < LANES; l++) v[l] = __builtin_sqrtf(v[l]);
  return v;
}

INLINE float sum(V v) {
  float s = 0;
  for (int l = 0; l < LANES; l++) s += v[l];
  return s;
}

}  // namespace ISA
