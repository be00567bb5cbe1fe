// All kernels of one instruction set: compiled once per set with -DISA=name -DLANES=n and the set's flags.
#include "kernels.h"

#include "conv_kernel.h"

namespace ISA {

using namespace dcil;

#if defined(FEW_TILES)
constexpr int kQuadTile = 2;
#elif LANES == 16
constexpr int kQuadTile = 6;  // four times this many sums fit the 32 registers
#else
constexpr int kQuadTile = 3;
#endif

template <int R, int C, int Step>
constexpr Tile tile() {
  if constexpr (R * C <= kQuadTile)
    return {R, C, conv<R, C, Step>, conv_by_channel<R, C, Step>, conv_quads<R, C, Step>};
  else
    return {R, C, conv<R, C, Step>, conv_by_channel<R, C, Step>, nullptr};
}

template <int Step>
struct Tiles {
  static constexpr Tile all[] = {
#ifdef FEW_TILES
      tile<1, 1, Step>(), tile<1, 2, Step>(), tile<2, 2, Step>(),  // compiles soon; enough for tests
#else
      tile<1, 1, Step>(), tile<1, 2, Step>(), tile<1, 3, Step>(), tile<1, 4, Step>(), tile<1, 6, Step>(),
      tile<1, 7, Step>(), tile<1, 8, Step>(), tile<1, 12, Step>(), tile<1, 14, Step>(), tile<2, 2, Step>(),
      tile<2, 4, Step>(), tile<2, 6, Step>(), tile<2, 7, Step>(), tile<3, 1, Step>(), tile<3, 4, Step>(),
      tile<4, 2, Step>(), tile<4, 3, Step>(), tile<4, 1, Step>(), tile<7, 1, Step>(), tile<7, 2, Step>(),
#endif
#if LANES == 16 && !defined(FEW_TILES)
      tile<1, 16, Step>(), tile<1, 24, Step>(), tile<2, 3, Step>(), tile<2, 8, Step>(), tile<2, 12, Step>(),
      tile<2, 14, Step>(), tile<3, 7, Step>(), tile<3, 8, Step>(), tile<4, 4, Step>(), tile<4, 6, Step>(),
      tile<4, 7, Step>(), tile<7, 4, Step>(), tile<14, 2, Step>(),
#endif
  };
};

static constexpr Tile any_tile = tile<1, 1, 0>();

/// Eight planes at a time share a move's permutation; at the end the last one may be done again, which changes nothing.
static void exchange(const HaloArgs& h) {
  for (int i = 0; i < h.count; i += 8) {
    float* plane[8];
    for (int k = 0; k < 8; k++) {
      const int last = i + k < h.count ? i + k : h.count - 1;
      plane[k] = h.planes.data + (h.channels ? h.channels[last] : h.first + last) * h.planes.plane;
    }
    for (const Move* m = h.moves; m < h.end; m++) {
      const VI order = *reinterpret_cast<const VI*>(h.orders + m->order * LANES);
      V moved[8];
#pragma GCC unroll 8
      for (int k = 0; k < 8; k++) moved[k] = permute(load(plane[k] + m->from), order);
#pragma GCC unroll 8
      for (int k = 0; k < 8; k++) store(plane[k] + m->to, moved[k]);
    }
  }
}

static void gather(float* to, const float* from, const int32_t* index, long count, int32_t limit, float fill) {
  for (long i = 0; i < count; i++) to[i] = uint32_t(index[i]) < uint32_t(limit) ? from[index[i]] : fill;
}

INLINE V pool_one(const PoolArgs& a, const float* p) {
  V v = load(at(p, a.distances[0]));
  if (a.scale)
    for (int i = 1; i < a.taps; i++) v += load(at(p, a.distances[i]));
  else
    for (int i = 1; i < a.taps; i++) v = larger(load(at(p, a.distances[i])), v);
  return v;
}

static void pool(const PoolArgs& a) {
  for (int c = a.c0; c < a.c1; c++)
    for (int y = a.y0; y < a.y1; y++) {
      const float* p = a.in.data + c * a.in.plane + y * a.row_step;
      for (int x = 0; x < a.width; x++, p += a.column_step) {
        const long i = (long(y) * a.width + x) * LANES;
        V v = pool_one(a, p);
        if (a.scale) v *= load(a.scale + i);
        if (a.mask) v = masked(v, a.mask + i);
        store(spot(a.out, c, y, x), v);
      }
    }
}

static void map(const MapArgs& a) {
  for (int c = a.c0; c < a.c1; c++) {
    const V scale = splat(a.scale ? a.scale[c] : 1.0f), shift = splat(a.shift ? a.shift[c] : 0.0f);
    for (int y = a.y0; y < a.y1; y++)
      for (int x = 0; x < a.width; x++) {
        V v = load(spot(a.a, c, y, x)) * scale + shift;
        if (a.b.data) v += load(spot(a.b, c, y, x));
        v = activate(v, a.act);
        if (a.mask) v = masked(v, a.mask + (long(y) * a.width + x) * LANES);
        store(spot(a.out, c, y, x), v);
      }
  }
}

static void plane_sum(const Planes& in, int channel, int height, int width, float* lanes) {
  V even = {}, odd = {};
  for (int y = 0; y < height; y++) {
    const float* row = spot(in, channel, y, 0);
    int x = 0;
    for (; x + 2 <= width; x += 2) {
      even += load(row + x * LANES);
      odd += load(row + (x + 1) * LANES);
    }
    if (x < width) even += load(row + x * LANES);
  }
  store(lanes, even + odd);
}

INLINE float dot(const float* a, const float* b, int n) {
  V s[2] = {};
  int i = 0;
  for (; i + 2 * LANES <= n; i += 2 * LANES) {
    s[0] += load_anywhere(a + i) * load_anywhere(b + i);
    s[1] += load_anywhere(a + i + LANES) * load_anywhere(b + i + LANES);
  }
  float total = sum(s[0] + s[1]);
  for (; i < n; i++) total += a[i] * b[i];
  return total;
}

INLINE float kept_dot(const LinearArgs& a, int o, const float* in) {
  float s[2] = {0, 0};
  for (int i = a.start[o]; i < a.start[o + 1]; i++) s[i & 1] += a.weight[i] * in[a.column[i]];
  return s[0] + s[1];
}

static void linear(const LinearArgs& a) {
  for (int o = a.o0; o < a.o1; o++)
    for (int n = 0; n < a.images; n++) {
      const float* in = a.in + long(n) * a.inputs;
      const long i = long(n) * a.outputs + o;
      float s = a.bias[o] + (a.dense ? dot(a.dense + long(o) * a.inputs, in, a.inputs) : kept_dot(a, o, in));
      if (a.residual) s += a.residual[i];
      a.out[i] = activate(splat(s), a.act)[0];
    }
}

}  // namespace ISA

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define TEXT_(a) #a
#define TEXT(a) TEXT_(a)

namespace dcil {

const KernelSet& JOIN(kernels_, ISA)() {
  static const KernelSet set = {TEXT(ISA),
                                LANES,
                                ISA::Tiles<1>::all,
                                ISA::Tiles<2>::all,
                                &ISA::any_tile,
                                int(sizeof(ISA::Tiles<1>::all) / sizeof(Tile)),
                                ISA::exchange,
                                ISA::gather,
                                ISA::pool,
                                ISA::map,
                                ISA::plane_sum,
                                ISA::linear};
  return set;
}

}  // namespace dcil
