// A vector of 4 LANES bytes, and the four vectors of 32-bit sums or floats that its bytes widen to.
//
// Included only by quant_kernels.cpp, under the rules of vector.h.
#pragma once
#include "activation.h"

namespace ISA {

constexpr int BYTES = 4 * LANES;
typedef uint8_t U __attribute__((vector_size(BYTES)));
typedef uint32_t VU32 __attribute__((vector_size(LANES * 4)));  // wraps around without being undefined

struct Sums {
  VI part[4];
};
struct Floats {
  V part[4];
};

INLINE U load(const uint8_t* p) { return *reinterpret_cast<const U*>(p); }
INLINE void store(uint8_t* p, U v) { *reinterpret_cast<U*>(p) = v; }
INLINE U splat_byte(uint8_t x) { return x - U{}; }
INLINE VI splat_int(int32_t x) { return x - VI{}; }
INLINE U choose(U mask, U a, U b) { return (a & mask) | (b & ~mask); }
INLINE U larger(U a, U b) { return (U)(a > b ? a : b); }
INLINE U smaller(U a, U b) { return (U)(a < b ? a : b); }

}  // namespace ISA

#if defined(__AVX2__)
#include "quant_x86.h"
#elif defined(NEON)
#include "quant_neon.h"
#else
#include "quant_plain.h"
#endif

namespace ISA {

INLINE Floats numbers(const Sums& sums) {
  Floats f;
  for (int r = 0; r < 4; r++) f.part[r] = __builtin_convertvector(sums.part[r], V);
  return f;
}

INLINE Floats widened(U v) { return numbers(integers(v)); }

}  // namespace ISA
