// Activations of whole vectors. exp is a polynomial on [-ln 2 / 2, ln 2 / 2] times a power of two.
#pragma once
#include "kernels.h"
#include "vector.h"

namespace ISA {

using namespace dcil;

/// The sum of c[i] x^i.
template <int N>
INLINE V polynomial(V x, const float (&c)[N]) {
  V y = splat(c[N - 1]);
#pragma GCC unroll 8
  for (int i = N - 2; i >= 0; i--) y = y * x + c[i];
  return y;
}

/// exp(x) to a few units in the last place; x beyond +-87 counts as that.
INLINE V exponential(V x) {
  static constexpr float taylor[] = {1, 1, 1 / 2.0f, 1 / 6.0f, 1 / 24.0f, 1 / 120.0f, 1 / 720.0f};
  x = smaller(splat(87.0f), larger(splat(-87.0f), x));
  const V big = splat(12582912.0f);  // 1.5 * 2^23: floats of this size are whole numbers
  const V n = (x * 1.44269504f + big) - big;
  const V rest = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts, the first of few bits
  const VI power = (__builtin_convertvector(n, VI) + 127) << 23;
  return polynomial(rest, taylor) * (V)power;
}

INLINE V sigmoid(V x) { return 1.0f / (1.0f + exponential(-x)); }

/// Where exp would cancel, the Taylor series of tanh, whose next term is below 2^-24 there.
INLINE V hyperbolic_tangent(V x) {
  static constexpr float taylor[] = {1, -1 / 3.0f, 2 / 15.0f, -17 / 315.0f, 62 / 2835.0f, -1382 / 155925.0f};
  const V far = 1.0f - 2.0f / (exponential(x + x) + 1.0f), square = x * x;
  return square < 0.0625f ? x * polynomial(square, taylor) : far;
}

/// erf(x) / x as a polynomial in x^2 (least maximum of erf's error, 5e-7 with rounding); 1 as floats beyond 3.92.
INLINE V error_function(V x) {
  static constexpr float c[] = {0.360736817f,     -0.180108637f,  0.134084269f,    -0.109178498f,
                                0.0906023160f,    -0.0740301833f, 0.0583584793f,   -0.0433746204f,
                                0.0298208855f,    -0.0201806072f, 0.0140048126f,   -0.00737170922f,
                                0.00208718586f,   -0.00161886308f, 0.00204574643f, -0.000775364053f};
  constexpr float end = 3.92f;
  const V size = x < 0.0f ? -x : x, whole = x < 0.0f ? splat(-1.0f) : splat(1.0f);
  return size < end ? x * polynomial(x * x * (2 / (end * end)) - 1.0f, c) : whole;
}

/// exp(x) - 1 for x <= 0, by its Taylor series where exp would cancel.
INLINE V below_one(V x) {
  static constexpr float taylor[] = {1, 1 / 2.0f, 1 / 6.0f, 1 / 24.0f, 1 / 120.0f, 1 / 720.0f};
  return x > -0.25f ? x * polynomial(x, taylor) : exponential(x) - 1.0f;
}

INLINE V activate(V x, const Activation& act) {
  switch (act.kind) {
    case Act::None: return x;
    case Act::Clamp: return smaller(splat(act.b), larger(splat(act.a), x));
    case Act::Leaky: return x > 0.0f ? x : x * act.a;
    case Act::Silu: return x * sigmoid(x);
    case Act::Hardswish: return x * smaller(splat(6.0f), larger(V{}, x + 3.0f)) * (1.0f / 6.0f);
    case Act::Sigmoid: return sigmoid(x);
    case Act::Hardsigmoid: return smaller(splat(6.0f), larger(V{}, x + 3.0f)) * (1.0f / 6.0f);
    case Act::Tanh: return hyperbolic_tangent(x);
    case Act::Gelu: return 0.5f * x * (1.0f + error_function(x * 0.70710678f));
    case Act::GeluTanh: return x * sigmoid(x * (1.59576912f + 0.07135481f * x * x));  // 2 sqrt(2 / pi) (x + 0.044715 x^3)
    case Act::Elu: return x > 0.0f ? x : act.a * below_one(x);
    case Act::Sqrt: return sqrt(x);
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

}  // namespace ISA
