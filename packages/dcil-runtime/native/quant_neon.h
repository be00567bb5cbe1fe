// What quant_vector.h asks of an instruction set, for the NEON of 64-bit ARM, with and without dot products of bytes.
#pragma once
#include <arm_neon.h>

namespace ISA {

#if defined(__ARM_FEATURE_DOTPROD)

/// Dot products are of bytes less this, because sdot multiplies signed bytes; the sums begin with what that leaves out.
constexpr int kByteOffset = 128;

/// The bytes of four inputs side by side.
struct Quad {
  int8x16_t part[4];
};

INLINE Quad interleaved(U a, U b, U c, U d) {
  const U low = (U)vzip1q_u8(a, b), high = (U)vzip2q_u8(a, b), more = (U)vzip1q_u8(c, d), most = (U)vzip2q_u8(c, d);
  const U offset = splat_byte(kByteOffset);
  return {{(int8x16_t)((U)vzip1q_u16((uint16x8_t)low, (uint16x8_t)more) ^ offset),
           (int8x16_t)((U)vzip2q_u16((uint16x8_t)low, (uint16x8_t)more) ^ offset),
           (int8x16_t)((U)vzip1q_u16((uint16x8_t)high, (uint16x8_t)most) ^ offset),
           (int8x16_t)((U)vzip2q_u16((uint16x8_t)high, (uint16x8_t)most) ^ offset)}};
}

/// sums += the dot products of four bytes with the four int8 in `weights`.
INLINE void add_dots(Sums& sums, const Quad& q, int32_t weights) {
  const int8x16_t w = (int8x16_t)splat_int(weights);
  for (int r = 0; r < 4; r++) sums.part[r] = (VI)vdotq_s32((int32x4_t)sums.part[r], q.part[r], w);
}

#else

constexpr int kByteOffset = 0;

/// Four inputs of 16 bits, the first 8 bytes and the last.
struct Quad {
  int16x8_t low[4], high[4];
};

INLINE Quad interleaved(U a, U b, U c, U d) {
  const U all[] = {a, b, c, d};
  Quad q;
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    q.low[i] = (int16x8_t)vmovl_u8(vget_low_u8(all[i]));
    q.high[i] = (int16x8_t)vmovl_high_u8(all[i]);
  }
  return q;
}

template <int Input>
INLINE void add_products(Sums& sums, const Quad& q, int16x4_t w) {
  sums.part[0] = (VI)vmlal_lane_s16((int32x4_t)sums.part[0], vget_low_s16(q.low[Input]), w, Input);
  sums.part[1] = (VI)vmlal_high_lane_s16((int32x4_t)sums.part[1], q.low[Input], w, Input);
  sums.part[2] = (VI)vmlal_lane_s16((int32x4_t)sums.part[2], vget_low_s16(q.high[Input]), w, Input);
  sums.part[3] = (VI)vmlal_high_lane_s16((int32x4_t)sums.part[3], q.high[Input], w, Input);
}

INLINE void add_dots(Sums& sums, const Quad& q, int32_t weights) {
  const int16x4_t w = vget_low_s16(vmovl_s8((int8x8_t)vdup_n_s32(weights)));
  add_products<0>(sums, q, w);
  add_products<1>(sums, q, w);
  add_products<2>(sums, q, w);
  add_products<3>(sums, q, w);
}

#endif

INLINE Sums integers(U v) {
  const uint16x8_t low = vmovl_u8(vget_low_u8(v)), high = vmovl_high_u8(v);
  return {{(VI)vmovl_u16(vget_low_u16(low)), (VI)vmovl_high_u16(low), (VI)vmovl_u16(vget_low_u16(high)),
           (VI)vmovl_high_u16(high)}};
}

/// Rounded to even, 0 to 255; not a number: 255. The conversions themselves saturate, so `Wild` matters to other sets only.
template <bool Wild = true>
INLINE U narrowed(const Floats& f) {
  uint32x4_t n[4];
  for (int r = 0; r < 4; r++) n[r] = vcvtnq_u32_f32((float32x4_t)smaller(f.part[r], splat(255.0f)));
  const uint16x8_t low = vqmovn_high_u32(vqmovn_u32(n[0]), n[1]), high = vqmovn_high_u32(vqmovn_u32(n[2]), n[3]);
  return (U)vqmovn_high_u16(vqmovn_u16(low), high);
}

static int order(int place) { return place; }

/// Bytes of `v` in the order `from`; `fill` where that is above 127.
INLINE U permute(U v, U from, U fill) { return (U)vqtbx1q_u8(fill, v, from); }

/// The dot product of n bytes, a multiple of 64.
INLINE int32_t dot_bytes(const uint8_t* a, const int8_t* w, int n) {
#if defined(__ARM_FEATURE_DOTPROD)
  int32x4_t s = {};
  for (int i = 0; i < n; i += 16) {
    const uint8x16_t bytes = veorq_u8(vld1q_u8(a + i), vdupq_n_u8(kByteOffset));
    s = vdotq_s32(s, vreinterpretq_s8_u8(bytes), vld1q_s8(w + i));
  }
  return vaddvq_s32(s);
#else
  int32x4_t s = {};
  for (int i = 0; i < n; i += 8) {
    const int16x8_t x = vreinterpretq_s16_u16(vmovl_u8(vld1_u8(a + i))), y = vmovl_s8(vld1_s8(w + i));
    s = vmlal_high_s16(vmlal_s16(s, vget_low_s16(x), vget_low_s16(y)), x, y);
  }
  return vaddvq_s32(s);
#endif
}

}  // namespace ISA
