// All kernels of one instruction set: compiled once per set with -DISA=name -DLANES=n and the set's flags.
#include "kernels.h"

#include <type_traits>

#include "attend.h"
#include "conv_kernel.h"
#include "pointwise.h"
#include "rearrange.h"

namespace ISA {

using namespace dcil;

#if defined(FEW_TILES)
constexpr int kQuadTile = 2;
#elif defined(MANY_REGISTERS)
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
#if defined(MANY_REGISTERS) && !defined(FEW_TILES)
      tile<1, 16, Step>(), tile<1, 24, Step>(), tile<2, 3, Step>(), tile<2, 8, Step>(), tile<2, 12, Step>(),
      tile<2, 14, Step>(), tile<3, 7, Step>(), tile<3, 8, Step>(), tile<4, 4, Step>(), tile<4, 6, Step>(),
      tile<4, 7, Step>(), tile<7, 4, Step>(), tile<14, 2, Step>(),
#endif
  };
};

static constexpr Tile any_tile = tile<1, 1, 0>();

/// Two neighbours at a time: one that waits for its own last tap leaves the other's loads room.
template <int N>
INLINE void pool_some(const PoolArgs& a, const float* p, int c, int y, int x) {
  V v[N];
  for (int k = 0; k < N; k++) v[k] = load(at(p + k * a.column_step, a.distances[0]));
  for (int i = 1; i < a.taps; i++)
    for (int k = 0; k < N; k++) {
      const V next = load(at(p + k * a.column_step, a.distances[i]));
      v[k] = a.scale ? v[k] + next : larger(next, v[k]);
    }
  for (int k = 0; k < N; k++) {
    const long i = (long(y) * a.width + x + k) * LANES;
    if (a.scale) v[k] *= load(a.scale + i);
    if (a.mask) v[k] = masked(v[k], a.mask + i);
    store(spot(a.out, c, y, x + k), v[k]);
  }
}

static void pool(const PoolArgs& a) {
  for (int c = a.c0; c < a.c1; c++)
    for (int y = a.y0; y < a.y1; y++) {
      const float* row = a.in.data + c * a.in.plane + y * a.row_step;
      int x = 0;
      for (; x + 2 <= a.width; x += 2) pool_some<2>(a, row + x * a.column_step, c, y, x);
      if (x < a.width) pool_some<1>(a, row + x * a.column_step, c, y, x);
    }
}

INLINE V plane_sum(const MeanArgs& a, int channel) {
  V even = {}, odd = {};
  for (int y = 0; y < a.height; y++) {
    const float* row = spot(a.in, channel, y, 0);
    int x = 0;
    for (; x + 2 <= a.width; x += 2) {
      even += load(row + x * LANES);
      odd += load(row + (x + 1) * LANES);
    }
    if (x < a.width) even += load(row + x * LANES);
  }
  return even + odd;
}

/// LANES channels at a time: their sums, turned so that a vector holds one lane of all of them, add up side by side.
static void mean(const MeanArgs& a) {
  const int tiles = LANES / a.images;
  for (int c = a.c0; c < a.c1; c += LANES) {
    const int count = a.c1 - c < LANES ? a.c1 - c : LANES;
    V lane[LANES] = {};
    for (int k = 0; k < count; k++) lane[k] = plane_sum(a, c + k);
    transpose(lane);
    for (int n = 0; n < a.images; n++) {
      V* own = lane + n * tiles;
      for (int half = tiles / 2; half > 0; half /= 2)
        for (int t = 0; t < half; t++) own[t] += own[t + half];
      own[0] *= a.scale;
      for (int k = 0; k < count; k++) a.out[long(n) * a.channels + c + k] = own[0][k];
    }
  }
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

/// The sums of an image's outputs become results, many at a time.
INLINE void activate_row(const LinearArgs& a, float* out) {
  for (int o = a.o0; o < a.o1; o += LANES) {
    const int count = a.o1 - o < LANES ? a.o1 - o : LANES;
    V v = load_some(out + o, count);
    activate_each(&v, 1, a.act);
    for (int l = 0; l < count; l++) out[o + l] = v[l];
  }
}

/// Four outputs at a time: their weights come from memory as four streams, and faster than as one.
INLINE void dense_dots(const LinearArgs& a, int o, const float* in, float* sums) {
  const float* w = a.dense + long(o) * a.inputs;
  V s[4] = {};
  int i = 0;
  for (; i + LANES <= a.inputs; i += LANES) {
    const V v = load_anywhere(in + i);
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) s[k] += load_anywhere(w + long(k) * a.inputs + i) * v;
  }
#pragma GCC unroll 4
  for (int k = 0; k < 4; k++) {
    sums[k] = sum(s[k]);
    for (int j = i; j < a.inputs; j++) sums[k] += w[long(k) * a.inputs + j] * in[j];
  }
}

static void linear(const LinearArgs& a) {
  for (int o = a.o0; o < a.o1; o += 4)
    for (int n = 0; n < a.images; n++) {
      const float* in = a.in + long(n) * a.inputs;
      const int count = a.o1 - o < 4 ? a.o1 - o : 4;
      float sums[4];
      if (a.dense && count == 4) {
        dense_dots(a, o, in, sums);
      } else {
        for (int k = 0; k < count; k++)
          sums[k] = a.dense ? dot(a.dense + long(o + k) * a.inputs, in, a.inputs) : kept_dot(a, o + k, in);
      }
      for (int k = 0; k < count; k++) {
        const long i = long(n) * a.outputs + o + k;
        const float s = a.bias[o + k] + sums[k];
        a.out[i] = a.residual ? s + a.residual[i] : s;
      }
    }
  for (int n = 0; n < a.images && a.act.kind != Act::None; n++) activate_row(a, a.out + long(n) * a.outputs);
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
                                ISA::interleave,
                                ISA::pool,
                                ISA::map,
                                ISA::join,
                                ISA::norm_pixels,
                                ISA::norm_planes,
                                ISA::norm_flat,
                                ISA::mean,
                                ISA::linear,
                                ISA::attend};
  return set;
}

}  // namespace dcil
