// What happens to finished sums before they are stored (see Finish in kernels.h).
#pragma once
#include "activation.h"

namespace ISA {

using namespace dcil;

INLINE V masked(V v, const int32_t* mask) { return (V)((VI)v & *reinterpret_cast<const VI*>(mask)); }

INLINE float* spot(const Planes& p, long channel, long y, long x) {
  return p.data + channel * p.plane + y * p.row + x * LANES;
}

template <int R, int C>
INLINE void put(const Finish& f, const Planes& to, int channel, int y, int x, const V* v) {
  float* p = spot(to, channel, y, x);
  if (!f.mask) {
#pragma GCC unroll 32
    for (int t = 0; t < R * C; t++) store(p + (t / C) * to.row + (t % C) * LANES, v[t]);
    return;
  }
  const int32_t* mask = f.mask + y * f.mask_row + x * LANES;
#pragma GCC unroll 32
  for (int t = 0; t < R * C; t++)
    store(p + (t / C) * to.row + (t % C) * LANES, masked(v[t], mask + (t / C) * f.mask_row + (t % C) * LANES));
}

template <int R, int C>
INLINE void finish(const Finish& f, int channel, int y, int x, V* v) {
  if (f.residual.data) {
    const float* p = spot(f.residual, channel, y, x);
#pragma GCC unroll 32
    for (int t = 0; t < R * C; t++) v[t] += load(p + (t / C) * f.residual.row + (t % C) * LANES);
  }
  if (f.simple) {  // most layers: nothing but a lower bound
    const V low = splat(f.low);
    float* p = spot(f.out, channel, y, x);
#pragma GCC unroll 32
    for (int t = 0; t < R * C; t++) store(p + (t / C) * f.out.row + (t % C) * LANES, larger(low, v[t]));
    return;
  }
  activate_all<R * C>(v, f.act);
  put<R, C>(f, f.out, channel, y, x, v);
  if (f.twin.data) {
    const V scale = splat(f.twin_scale[channel]), shift = splat(f.twin_shift[channel]);
#pragma GCC unroll 32
    for (int t = 0; t < R * C; t++) v[t] = v[t] * scale + shift;
    activate_all<R * C>(v, f.twin_act);
    put<R, C>(f, f.twin, channel, y, x, v);
  }
}

}  // namespace ISA
