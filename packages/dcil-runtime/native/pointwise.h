// Maps, sums and products of whole tensors, and norms whose statistics depend on the image.
#pragma once
#include "finish.h"

namespace ISA {

using namespace dcil;

/// Calls f(x, count) with a constant count for pieces of a row.
template <class F>
INLINE void in_fours(int width, F f) {
  int x = 0;
  for (; x + 4 <= width; x += 4) f(x, std::integral_constant<int, 4>());
  for (; x < width; x++) f(x, std::integral_constant<int, 1>());
}

/// out = act(v), zero where the mask is; `place` counts vectors in a mask.
template <int N>
INLINE void put_row(float* out, V* v, const Activation& act, const int32_t* mask, long place) {
  activate_all<N>(v, act);
  for (int t = 0; t < N; t++) store(out + t * LANES, mask ? masked(v[t], mask + (place + t) * LANES) : v[t]);
}

static void map(const MapArgs& a) {
  for (int c = a.c0; c < a.c1; c++) {
    const V scale = splat(a.scale ? a.scale[c] : 1.0f), shift = splat(a.shift ? a.shift[c] : 0.0f);
    for (int y = a.y0; y < a.y1; y++)
      in_fours(a.width, [&](int x, auto count) {
        constexpr int N = decltype(count)::value;
        V v[N];
        for (int t = 0; t < N; t++) v[t] = load(spot(a.a, c, y, x + t)) * scale + shift;
        if (a.b.data)
          for (int t = 0; t < N; t++) v[t] += load(spot(a.b, c, y, x + t));
        put_row<N>(spot(a.out, c, y, x), v, a.act, a.mask, long(y) * a.width + x);
      });
  }
}

template <Join Kind>
INLINE V joined(V a, V b) {
  return Kind == Join::Add ? a + b : Kind == Join::Sub ? a - b : Kind == Join::Mul ? a * b : a / b;
}

/// Every lane gets its image's number.
INLINE V spread(const float* each, long step, int images) {
  V v = splat(each[0]);
  if (images > 1)
    for (int l = 0; l < LANES; l++) v[l] = each[l / (LANES / images) * step];
  return v;
}

template <Join Kind>
static void join_as(const JoinArgs& a) {
  for (int c = a.c0; c < a.c1; c++) {
    const V one = a.each ? spread(a.each + c * a.each_channel, a.each_image, a.images) : V{};
    for (int y = a.y0; y < a.y1; y++)
      in_fours(a.width, [&](int x, auto count) {
        constexpr int N = decltype(count)::value;
        V v[N];
        for (int t = 0; t < N; t++)
          v[t] = joined<Kind>(load(spot(a.a, c, y, x + t)), a.each ? one : load(spot(a.b, c, y, x + t)));
        put_row<N>(spot(a.out, c, y, x), v, a.act, a.mask, long(y) * a.width + x);
      });
  }
}

static void join(const JoinArgs& a) {
  switch (a.kind) {
    case Join::Add: return join_as<Join::Add>(a);
    case Join::Sub: return join_as<Join::Sub>(a);
    case Join::Mul: return join_as<Join::Mul>(a);
    case Join::Div: return join_as<Join::Div>(a);
  }
}

INLINE V factor(const float* vector, int channel, float otherwise) { return splat(vector ? vector[channel] : otherwise); }

/// The channels of a few neighbouring pixels: their mean, then their variance, then the result.
template <int N>
INLINE void norm_some(const NormArgs& a, int y, int x) {
  V mean[N] = {}, variance[N] = {};
  const float share = 1.0f / float(a.c1 - a.c0);
  for (int c = a.c0; c < a.c1; c++)
    for (int t = 0; t < N; t++) mean[t] += load(spot(a.in, c, y, x + t));
  for (int t = 0; t < N; t++) mean[t] *= share;
  for (int c = a.c0; c < a.c1; c++)
    for (int t = 0; t < N; t++) {
      const V off = load(spot(a.in, c, y, x + t)) - mean[t];
      variance[t] += off * off;
    }
  for (int t = 0; t < N; t++) variance[t] = 1.0f / sqrt(variance[t] * share + a.eps);
  for (int c = a.c0; c < a.c1; c++) {
    const V scale = factor(a.scale, c, 1), shift = factor(a.shift, c, 0);
    V v[N];
    for (int t = 0; t < N; t++) v[t] = (load(spot(a.in, c, y, x + t)) - mean[t]) * variance[t] * scale + shift;
    put_row<N>(spot(a.out, c, y, x), v, a.act, a.mask, long(y) * a.width + x);
  }
}

static void norm_pixels(const NormArgs& a) {
  for (int y = a.y0; y < a.y1; y++)
    in_fours(a.width, [&](int x, auto count) { norm_some<decltype(count)::value>(a, y, x); });
}

/// The sum over every image's lanes, in each of them.
INLINE V within_images(V v, int images) {
  const int tiles = LANES / images;
  for (int n = 0; n < images; n++) {
    float total = 0;
    for (int l = 0; l < tiles; l++) total += v[n * tiles + l];
    for (int l = 0; l < tiles; l++) v[n * tiles + l] = total;
  }
  return v;
}

/// The sum of f(x) over all pixels of the channels, by rows, so that no partial sum grows long.
template <class F>
INLINE V plane_total(const NormArgs& a, F f) {
  V total = {};
  for (int c = a.c0; c < a.c1; c++)
    for (int y = a.y0; y < a.y1; y++) {
      V row = {};
      for (int x = 0; x < a.width; x++) {
        const V v = f(load(spot(a.in, c, y, x)));
        row += a.mask ? masked(v, a.mask + (long(y) * a.width + x) * LANES) : v;
      }
      total += row;
    }
  return within_images(total, a.images);
}

static void norm_planes(const NormArgs& a) {
  const float share = 1.0f / (float(a.c1 - a.c0) * float(a.pixels));
  const V mean = plane_total(a, [](V v) { return v; }) * share;
  const V variance = plane_total(a, [&](V v) { return (v - mean) * (v - mean); }) * share;
  const V inverse = 1.0f / sqrt(variance + a.eps);
  for (int c = a.c0; c < a.c1; c++) {
    const V scale = factor(a.scale, c, 1) * inverse, shift = factor(a.shift, c, 0) - mean * scale;
    for (int y = a.y0; y < a.y1; y++)
      in_fours(a.width, [&](int x, auto count) {
        constexpr int N = decltype(count)::value;
        V v[N];
        for (int t = 0; t < N; t++) v[t] = load(spot(a.in, c, y, x + t)) * scale + shift;
        put_row<N>(spot(a.out, c, y, x), v, a.act, a.mask, long(y) * a.width + x);
      });
  }
}

/// Up to LANES of the channels at a time.
template <class F>
INLINE void in_vectors(int begin, int end, F f) {
  for (int c = begin; c < end; c += LANES) f(c, end - c < LANES ? end - c : LANES);
}

static void norm_flat(const NormArgs& a) {
  for (int n = 0; n < a.images; n++) {
    const float* in = a.in.data + long(n) * a.channels;
    float* out = a.out.data + long(n) * a.channels;
    V total = {}, squares = {};
    in_vectors(a.c0, a.c1, [&](int c, int count) { total += load_some(in + c, count); });
    const float share = 1.0f / float(a.c1 - a.c0), mean = sum(total) * share;
    in_vectors(a.c0, a.c1, [&](int c, int count) {
      V off = load_some(in + c, count) - mean;
      for (int l = count; l < LANES; l++) off[l] = 0;
      squares += off * off;
    });
    const float inverse = 1.0f / __builtin_sqrtf(sum(squares) * share + a.eps);
    in_vectors(a.c0, a.c1, [&](int c, int count) {
      V v = (load_some(in + c, count) - mean) * inverse;
      if (a.scale) v = v * load_some(a.scale + c, count) + load_some(a.shift + c, count);
      activate_each(&v, 1, a.act);
      for (int l = 0; l < count; l++) out[c + l] = v[l];
    });
  }
}

}  // namespace ISA
