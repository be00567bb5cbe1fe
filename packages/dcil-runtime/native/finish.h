// What happens to finished sums before they are stored (see Finish in kernels.h).
#pragma once
#include "kernels.h"
#include "vector.h"

namespace ISA {

using namespace dcil;

INLINE V sigmoid(V x) {
  V r;
  for (int l = 0; l < LANES; l++) r[l] = 1.0f / (1.0f + __builtin_expf(-x[l]));
  return r;
}

INLINE V activate(V x, const Activation& act) {
  switch (act.kind) {
    case Act::None: return x;
    case Act::Clamp: return smaller(splat(act.b), larger(splat(act.a), x));
    case Act::Leaky: return x > 0.0f ? x : x * act.a;
    case Act::Silu: return x * sigmoid(x);
    case Act::Hardswish: return x * smaller(splat(6.0f), larger(V{}, x + 3.0f)) * (1.0f / 6.0f);
  }
  return x;
}

/// The rarer activations, in one place instead of in every kernel.
static __attribute__((noinline)) void activate_each(V* v, int count, const Activation& act) {
  for (int t = 0; t < count; t++) v[t] = activate(v[t], act);
}

template <int T>
INLINE void activate_all(V* v, const Activation& act) {
  if (act.kind == Act::None) return;
  if (act.kind == Act::Clamp) {
    const V low = splat(act.a), high = splat(act.b);
#pragma GCC unroll 32
    for (int t = 0; t < T; t++) v[t] = larger(low, v[t]);
    if (act.b == __builtin_inff()) return;
#pragma GCC unroll 32
    for (int t = 0; t < T; t++) v[t] = smaller(high, v[t]);
    return;
  }
  V copy[T];  // so that v itself never needs an address and stays in registers
#pragma GCC unroll 32
  for (int t = 0; t < T; t++) copy[t] = v[t];
  activate_each(copy, T, act);
#pragma GCC unroll 32
  for (int t = 0; t < T; t++) v[t] = copy[t];
}

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
