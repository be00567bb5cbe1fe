// The sparse convolution: a tile of output vectors stays in registers while the kept weights stream by.
#pragma once
#include "finish.h"

namespace ISA {

using namespace dcil;

/// How tile vectors lie in the input: compile-time column steps become address constants.
template <int Columns, int Step>
INLINE const float* under(const float* p, const ConvArgs& a, int t) {
  long column = Step ? Step * LANES : a.column_step;
  return p + (t / Columns) * a.row_step + (t % Columns) * column;
}

INLINE const float* at(const float* base, int32_t distance) {
  return reinterpret_cast<const float*>(reinterpret_cast<const char*>(base) + distance);
}

template <int R, int C, int Step>
INLINE void add_tap(V* sums, const ConvArgs& a, const float* base, const Tap& tap) {
  const float* p = at(base, tap.distance);
  asm("" : "+r"(p));  // one pointer per tap: otherwise the compiler keeps one per tile row and spills
  V w = splat(tap.weight);
#pragma GCC unroll 32
  for (int t = 0; t < R * C; t++) {
    if (R * C >= 16 && t && t % C == 0) {  // it goes from row to row: else all their distances take registers
      p += a.row_step;
      asm("" : "+r"(p));
    }
    sums[t] += w * load(under<C, Step>(p, a, R * C >= 16 ? t % C : t));
  }
}

/// Partial sums per tile vector: small tiles keep several, so that additions need not wait for each other.
constexpr int ways(int tile) { return tile >= 8 ? 1 : tile >= 4 ? 2 : 4; }

/// sums[t] += every tap, with ways(T) sums for each of the T; returns the tap after the last.
template <int R, int C, int Step>
INLINE const Tap* add_taps(V* sums, const ConvArgs& a, const float* base, const Tap* tap, int count) {
  constexpr int T = R * C, Ways = ways(T), AtOnce = Ways == 1 ? 2 : Ways;
#pragma GCC unroll 32
  for (int t = T; t < T * Ways; t++) sums[t] = V{};
  for (; count >= AtOnce; count -= AtOnce, tap += AtOnce) {
    if (Ways > 1) __builtin_prefetch(tap + 64);  // small tiles use taps up faster than the CPU fetches them by itself
#pragma GCC unroll 4
    for (int i = 0; i < AtOnce; i++) add_tap<R, C, Step>(sums + i % Ways * T, a, base, tap[i]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < AtOnce - 1; i++) {
    if (i >= count) break;
    add_tap<R, C, Step>(sums + i % Ways * T, a, base, tap[i]);
  }
#pragma GCC unroll 4
  for (int i = 1; i < Ways; i++)
#pragma GCC unroll 32
    for (int t = 0; t < T; t++) sums[t] += sums[i * T + t];
  return tap + count;
}

/// Calls body(y, x) for tiles that cover the wanted rectangle; the last ones step back and overlap.
template <int R, int C, class Body>
INLINE void for_tiles(const ConvArgs& a, Body body) {
  for (int x = a.x0; x < a.x1; x += C)
    for (int y = a.y0; y < a.y1; y += R) body(y + R > a.y1 ? a.y1 - R : y, x + C > a.x1 ? a.x1 - C : x);
}

INLINE const float* origin(const ConvArgs& a, int y, int x) {
  const float* p = a.in + y * a.row_step + x * a.column_step;
  asm("" : "+r"(p));  // computed once, not in every tap
  return p;
}

/// One block of input channels; sums rest in the scratch between blocks. First and last are known to the compiler,
/// because rows are short: at 95 % sparsity whatever is asked per row costs as much as a tap.
template <int R, int C, int Step, bool First, bool Last>
INLINE void conv_block(const ConvArgs& a, const Rows& rows, int y, int x) {
  constexpr int T = R * C;
  const float* base = origin(a, y, x);
  const Tap* tap = rows.taps + rows.start[rows.begin];  // rows follow each other, so this one pointer sees them all
  for (int i = rows.begin; i < rows.end; i++) {
    const int channel = rows.channel[i];
    float* rest = a.scratch + long(channel) * T * LANES;
    V sums[T * ways(T)];
#pragma GCC unroll 32
    for (int t = 0; t < T; t++) sums[t] = First ? splat(a.finish.bias[channel]) : load(rest + t * LANES);
    tap = add_taps<R, C, Step>(sums, a, base, tap, rows.start[i + 1] - rows.start[i]);
    if (Last) {
      finish<R, C>(a.finish, channel, y, x, sums);
    } else {
#pragma GCC unroll 32
      for (int t = 0; t < T; t++) store(rest + t * LANES, sums[t]);
    }
  }
}

template <int R, int C, int Step>
static void conv(const ConvArgs& a) {
  const int last = a.block_count - 1;
  if (last == 0) {
    for_tiles<R, C>(a, [&](int y, int x) { conv_block<R, C, Step, true, true>(a, a.blocks[0], y, x); });
    return;
  }
  for_tiles<R, C>(a, [&](int y, int x) {
    conv_block<R, C, Step, true, false>(a, a.blocks[0], y, x);
    for (int b = 1; b < last; b++) conv_block<R, C, Step, false, false>(a, a.blocks[b], y, x);
    conv_block<R, C, Step, false, true>(a, a.blocks[last], y, x);
  });
}

template <int R, int C, int Step>
static void conv_by_channel(const ConvArgs& a) {
  const Rows& rows = a.blocks[0];
  for (int i = rows.begin; i < rows.end; i++) {
    const int channel = rows.channel[i], count = rows.start[i + 1] - rows.start[i];
    for_tiles<R, C>(a, [&](int y, int x) {
      V sums[R * C * ways(R * C)];
#pragma GCC unroll 32
      for (int t = 0; t < R * C; t++) sums[t] = splat(a.finish.bias[channel]);
      add_taps<R, C, Step>(sums, a, origin(a, y, x), rows.taps + rows.start[i], count);
      finish<R, C>(a.finish, channel, y, x, sums);
    });
  }
}

/// Nearly dense layers: one load feeds four output channels.
template <int R, int C, int Step>
static void conv_quads(const ConvArgs& a) {
  constexpr int T = R * C;
  const Quads& q = a.quads;
  for_tiles<R, C>(a, [&](int y, int x) {
    const float* base = origin(a, y, x);
    for (int i = q.begin; i < q.end; i++) {
      const int32_t* channel = q.channel + 4 * i;
      V sums[4][T];
#pragma GCC unroll 4
      for (int k = 0; k < 4; k++)
#pragma GCC unroll 32
        for (int t = 0; t < T; t++) sums[k][t] = splat(channel[k] < 0 ? 0.0f : a.finish.bias[channel[k]]);
      for (const QuadTap *tap = q.taps + q.start[i], *end = q.taps + q.start[i + 1]; tap < end; tap++) {
        const float* p = at(base, tap->distance);
        V v[T];
#pragma GCC unroll 32
        for (int t = 0; t < T; t++) v[t] = load(under<C, Step>(p, a, t));
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
          V w = splat(tap->weight[k]);
#pragma GCC unroll 32
          for (int t = 0; t < T; t++) sums[k][t] += w * v[t];
        }
      }
#pragma GCC unroll 4
      for (int k = 0; k < 4; k++)
        if (channel[k] >= 0) finish<R, C>(a.finish, channel[k], y, x, sums[k]);
    }
  });
}

}  // namespace ISA
