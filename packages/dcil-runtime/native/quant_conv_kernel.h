// The sparse convolution of u8 and int8: a tile of 32-bit sums stays in registers while groups of four kept inputs
// stream by (quant_kernels.h). `Width` output channels that keep many of the same inputs share the interleaving.
#pragma once
#include "quant_vector.h"

namespace ISA {

using namespace dcil;

INLINE uint8_t* spot(const BytePlanes& p, long channel, long y, long x) {
  return p.data + channel * p.plane + y * p.row + x * BYTES;
}

INLINE U outside(U v, const uint8_t* mask, float zero) {
  return mask ? choose(load(mask), v, splat_byte(uint8_t(zero))) : v;
}

/// The general activation, and the twin: in real numbers.
static __attribute__((noinline)) U finish_real(const QuantFinish& f, int channel, int y, int x, Floats t,
                                               const uint8_t* mask) {
  for (V& v : t.part) v = (v - f.store.zero) * f.store.scale;
  activate_each(t.part, 4, f.act);
  if (f.twin.data) {
    Floats u;
    for (int r = 0; r < 4; r++) u.part[r] = t.part[r] * f.twin_scale[channel] + f.twin_shift[channel];
    activate_each(u.part, 4, f.twin_act);
    for (V& v : u.part) v = v * f.twin_store.inverse + f.twin_store.zero;
    store(spot(f.twin, channel, y, x), outside(narrowed(u), mask, f.twin_store.zero));
  }
  for (V& v : t.part) v = v * f.store.inverse + f.store.zero;
  return narrowed(t);
}

/// One vector of sums, as QuantFinish says.
INLINE void finish(const QuantFinish& f, int channel, int y, int x, Floats t) {
  const V scale = splat(f.scale[channel]), offset = splat(f.offset[channel]);
#pragma GCC unroll 4
  for (int r = 0; r < 4; r++) t.part[r] = t.part[r] * scale + offset;
  if (f.residual.data) {
    const Floats more = widened(load(spot(f.residual, channel, y, x)));
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++) t.part[r] += more.part[r] * f.residual_scale;
  }
  const uint8_t* mask = f.mask ? f.mask + y * f.mask_row + x * BYTES : nullptr;
  const bool real = f.twin.data || f.act.kind != Act::None;
  const U v = real ? finish_real(f, channel, y, x, t, mask) : f.wild ? narrowed(t) : narrowed<false>(t);
  const U inside = smaller(larger(v, splat_byte(f.store.low)), splat_byte(f.store.high));
  store(spot(f.out, channel, y, x), outside(inside, mask, f.store.zero));
}

/// How tile vectors lie in the input: a compile-time column step becomes an address constant.
template <int Columns, int Step>
INLINE const uint8_t* under(const uint8_t* p, const QuantConvArgs& a, int t) {
  const long column = Step ? Step * BYTES : a.column_step;
  return p + (t / Columns) * a.row_step + (t % Columns) * column;
}

template <int R, int C, int Width, int Step>
INLINE void conv_tile(const QuantConvArgs& a, int y, int x) {
  constexpr int T = R * C;
  const uint8_t* base = a.in + y * a.row_step + x * a.column_step;
  const int32_t* p = a.groups.stream + long(a.groups.start[a.groups.begin]) * (4 + Width);
  for (int i = a.groups.begin; i < a.groups.end; i++) {
    const int32_t* channel = a.groups.channel + i * Width;
    Sums sums[Width][T];
#pragma GCC unroll 4
    for (int k = 0; k < Width; k++)
#pragma GCC unroll 4
      for (int t = 0; t < T; t++)
        for (VI& part : sums[k][t].part) part = splat_int(channel[k] < 0 ? 0 : a.first[channel[k]]);
    for (int n = a.groups.start[i + 1] - a.groups.start[i]; n > 0; n--, p += 4 + Width) {
#pragma GCC unroll 4
      for (int t = 0; t < T; t++) {
        const Quad q = interleaved(load(under<C, Step>(base + p[0], a, t)), load(under<C, Step>(base + p[1], a, t)),
                                   load(under<C, Step>(base + p[2], a, t)), load(under<C, Step>(base + p[3], a, t)));
#pragma GCC unroll 4
        for (int k = 0; k < Width; k++) add_dots(sums[k][t], q, p[4 + k]);
      }
    }
#pragma GCC unroll 4
    for (int k = 0; k < Width; k++) {
      if (channel[k] < 0) continue;
#pragma GCC unroll 4
      for (int t = 0; t < T; t++) finish(a.finish, channel[k], y + t / C, x + t % C, numbers(sums[k][t]));
    }
  }
}

/// Tiles that cover the wanted rectangle; the last ones step back and overlap.
template <int R, int C, int Width, int Step>
static void quant_conv(const QuantConvArgs& a) {
  for (int x = a.x0; x < a.x1; x += C)
    for (int y = a.y0; y < a.y1; y += R)
      conv_tile<R, C, Width, Step>(a, y + R > a.y1 ? a.y1 - R : y, x + C > a.x1 ? a.x1 - C : x);
}

}  // namespace ISA
