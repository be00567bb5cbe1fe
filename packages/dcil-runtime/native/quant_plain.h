// What quant_vector.h asks of an instruction set, in plain code.
#pragma once

namespace ISA {

/// Dot products are of bytes less this.
constexpr int kByteOffset = 0;

struct Quad {
  U input[4];
};

INLINE Quad interleaved(U a, U b, U c, U d) { return {{a, b, c, d}}; }

INLINE VI part_of(U v, int r) {
  VI n;
  for (int l = 0; l < LANES; l++) n[l] = v[r * LANES + l];
  return n;
}

INLINE void add_dots(Sums& sums, const Quad& q, int32_t weights) {
  for (int r = 0; r < 4; r++)
    for (int i = 0; i < 4; i++) {
      const VI product = part_of(q.input[i], r) * splat_int(int8_t(uint32_t(weights) >> (8 * i)));
      sums.part[r] = (VI)((VU32)sums.part[r] + (VU32)product);
    }
}

INLINE Sums integers(U v) { return {{part_of(v, 0), part_of(v, 1), part_of(v, 2), part_of(v, 3)}}; }

/// Rounded to even, 0 to 255; not a number: 255.
template <bool Wild = true>
INLINE U narrowed(const Floats& f) {
  U v;
  for (int r = 0; r < 4; r++) {
    const V x = larger(smaller(f.part[r], splat(255.0f)), splat(0.0f));
    const VI n = (VI)(x + 12582912.0f) - 0x4B400000;  // floats of this size are whole numbers
    for (int l = 0; l < LANES; l++) v[r * LANES + l] = uint8_t(n[l]);
  }
  return v;
}

static int order(int place) { return place; }

/// Bytes of `v` in the order `from`; `fill` where that is above 127.
INLINE U permute(U v, U from, U fill) {
  U moved;
  for (int i = 0; i < BYTES; i++) moved[i] = from[i] > 127 ? fill[i] : v[from[i] % BYTES];
  return moved;
}

/// The dot product of n bytes, a multiple of 64.
INLINE int32_t dot_bytes(const uint8_t* a, const int8_t* w, int n) {
  uint32_t s = 0;  // wraps around as vectors do
  for (int i = 0; i < n; i++) s += uint32_t(a[i] * w[i]);
  return int32_t(s);
}

}  // namespace ISA
