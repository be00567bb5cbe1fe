// What quant_vector.h asks of an instruction set, for AVX2 and AVX-512, with and without dot products of bytes.
#pragma once
#include <immintrin.h>

namespace ISA {

#if defined(__AVX512BW__)
#define WIDE_OP(name) _mm512_##name
typedef __m512i Wide;
#elif defined(__AVX2__)
#define WIDE_OP(name) _mm256_##name
typedef __m256i Wide;
#endif

/// Dot products are of bytes less this.
constexpr int kByteOffset = 0;

/// The bytes of four inputs side by side.
struct Quad {
  Wide part[4];
};

INLINE Quad interleaved(U a, U b, U c, U d) {
  const Wide low = WIDE_OP(unpacklo_epi8)((Wide)a, (Wide)b), high = WIDE_OP(unpackhi_epi8)((Wide)a, (Wide)b);
  const Wide more = WIDE_OP(unpacklo_epi8)((Wide)c, (Wide)d), most = WIDE_OP(unpackhi_epi8)((Wide)c, (Wide)d);
  return {{WIDE_OP(unpacklo_epi16)(low, more), WIDE_OP(unpackhi_epi16)(low, more), WIDE_OP(unpacklo_epi16)(high, most),
           WIDE_OP(unpackhi_epi16)(high, most)}};
}

/// sums += the dot products of four bytes with the four int8 in `weights`.
INLINE void add_dots(Sums& sums, const Quad& q, int32_t weights) {
  const Wide w = WIDE_OP(set1_epi32)(weights);
#if defined(__AVX512VNNI__)
  for (int r = 0; r < 4; r++) sums.part[r] = (VI)_mm512_dpbusd_epi32((Wide)sums.part[r], q.part[r], w);
#elif defined(__AVXVNNI__)
  for (int r = 0; r < 4; r++) sums.part[r] = (VI)_mm256_dpbusd_avx_epi32((Wide)sums.part[r], q.part[r], w);
#else  // products of 16 bits, because sums of two products of bytes need 17
  const Wide odd = WIDE_OP(srai_epi16)(w, 8), even = WIDE_OP(srai_epi16)(WIDE_OP(slli_epi16)(w, 8), 8);
  const Wide low = WIDE_OP(set1_epi16)(255);
  for (int r = 0; r < 4; r++) {
#if defined(__AVX512BW__)
    const Wide first = _mm512_madd_epi16(_mm512_and_si512(q.part[r], low), even);
#else
    const Wide first = _mm256_madd_epi16(_mm256_and_si256(q.part[r], low), even);
#endif
    const Wide second = WIDE_OP(madd_epi16)(WIDE_OP(srli_epi16)(q.part[r], 8), odd);
    sums.part[r] = (VI)WIDE_OP(add_epi32)((Wide)sums.part[r], WIDE_OP(add_epi32)(first, second));
  }
#endif
}

INLINE Sums integers(U v) {
  const Wide none = {};
  const Wide low = WIDE_OP(unpacklo_epi8)((Wide)v, none), high = WIDE_OP(unpackhi_epi8)((Wide)v, none);
  return {{(VI)WIDE_OP(unpacklo_epi16)(low, none), (VI)WIDE_OP(unpackhi_epi16)(low, none),
           (VI)WIDE_OP(unpacklo_epi16)(high, none), (VI)WIDE_OP(unpackhi_epi16)(high, none)}};
}

/// Rounded to even, 0 to 255; not a number: 255. Not `Wild`: numbers below 2^31 only.
template <bool Wild = true>
INLINE U narrowed(const Floats& f) {
  Wide n[4];
  for (int r = 0; r < 4; r++)
    n[r] = WIDE_OP(cvtps_epi32)((decltype(WIDE_OP(setzero_ps)()))(Wild ? smaller(f.part[r], splat(65536.0f)) : f.part[r]));
  return (U)WIDE_OP(packus_epi16)(WIDE_OP(packs_epi32)(n[0], n[1]), WIDE_OP(packs_epi32)(n[2], n[3]));
}

static int order(int place) { return place % LANES / 4 * 16 + place / LANES * 4 + place % 4; }

/// Bytes of `v` in the order `from`; `fill` where that is above 127.
INLINE U permute(U v, U from, U fill) {
#if defined(__AVX512VBMI__)
  return (U)_mm512_mask_permutexvar_epi8((Wide)fill, ~_mm512_movepi8_mask((Wide)from), (Wide)from, (Wide)v);
#else
  // Adding 0x70 sets the top bit of places that another 16 bytes hold, and the shuffle gives 0 for these.
  U lane, moved = {};
  for (int i = 0; i < BYTES; i++) lane[i] = uint8_t(i & ~15);
  const U near = from ^ lane;
#pragma GCC unroll 4
  for (int d = 0; d < BYTES / 16; d++) {
    const Wide places = WIDE_OP(adds_epu8)((Wide)(near ^ splat_byte(uint8_t(16 * d))), WIDE_OP(set1_epi8)(0x70));
#if defined(__AVX512BW__)
    const Wide source = d == 0   ? (Wide)v
                        : d == 1 ? _mm512_shuffle_i64x2((Wide)v, (Wide)v, 0xb1)
                        : d == 2 ? _mm512_shuffle_i64x2((Wide)v, (Wide)v, 0x4e)
                                 : _mm512_shuffle_i64x2((Wide)v, (Wide)v, 0x1b);
#else
    const Wide source = d == 0 ? (Wide)v : _mm256_permute4x64_epi64((Wide)v, 0x4e);
#endif
    moved |= (U)WIDE_OP(shuffle_epi8)(source, places);
  }
  return choose((U)(from > splat_byte(127)), fill, moved);
#endif
}

/// The dot product of n bytes, a multiple of 64.
INLINE int32_t dot_bytes(const uint8_t* a, const int8_t* w, int n) {
#if defined(__AVX512VNNI__)
  __m512i s = {};
  for (int i = 0; i < n; i += 64) s = _mm512_dpbusd_epi32(s, _mm512_loadu_si512(a + i), _mm512_loadu_si512(w + i));
  return _mm512_reduce_add_epi32(s);
#else
  uint32_t s = 0;  // wraps around as vectors do
  for (int i = 0; i < n; i++) s += uint32_t(a[i] * w[i]);
  return int32_t(s);
#endif
}

}  // namespace ISA
