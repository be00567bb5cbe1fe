// Attention of one head: queries lie in lanes, so that the softmax over the keys needs no sums across a vector.
#pragma once
#include "activation.h"

namespace ISA {

using namespace dcil;

/// Vectors of queries at once: that many sums for each row of a panel fit the registers.
#ifdef MANY_REGISTERS
constexpr int kMostVectors = kMostQueries;
#else
constexpr int kMostVectors = 2;
#endif

/// sums[m][n] = the sum over k of panel[k][m] * a[k][n], for kPanel rows m and N vectors n of `a`.
template <int N>
INLINE void panel_product(V (&sums)[kPanel][N], const float* panel, const float* a, long step, int count) {
#pragma GCC unroll 8
  for (int m = 0; m < kPanel; m++)
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) sums[m][n] = V{};
  for (int k = 0; k < count; k++, panel += kPanel, a += step) {
    V v[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) v[n] = load(a + n * LANES);
#pragma GCC unroll 8
    for (int m = 0; m < kPanel; m++) {
      const V w = splat(panel[m]);
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) sums[m][n] += w * v[n];
    }
  }
}

/// scores[key][n] = scale * query . key + what is added; returns their maxima over the keys.
template <int N>
INLINE void all_scores(const AttendArgs& a, int first, V (&most)[N]) {
  for (int n = 0; n < N; n++) most[n] = splat(-__builtin_inff());
  for (int j = 0; j < a.keys; j += kPanel) {
    V sums[kPanel][N];
    panel_product<N>(sums, a.key + long(j) * a.depth, a.query + long(first) * LANES, a.query_step, a.depth);
#pragma GCC unroll 8
    for (int m = 0; m < kPanel; m++) {
      if (j + m >= a.keys) break;
      const float each = a.each ? a.each[j + m] : 0;
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) {
        V score = sums[m][n] * a.scale + each;
        if (a.added) {
          const int begin = (first + n) * LANES, rest = a.queries - begin;
          const float* p = a.added + long(j + m) * a.queries + begin;
          score += rest < LANES ? load_some(p, rest) : load_anywhere(p);
        }
        most[n] = larger(score, most[n]);
        store(a.scores + (long(j + m) * N + n) * LANES, score);
      }
    }
  }
}

/// Softmax and the sums of the values that it weighs, for N vectors of queries from the `first` on.
template <int N>
static void attend_some(const AttendArgs& a, int first) {
  V most[N], total[N] = {};
  all_scores<N>(a, first, most);
  for (int n = 0; n < N; n++) most[n] = larger(splat(-3.4e38f), most[n]);  // nothing to attend to: exp(-inf) everywhere
  for (int j = 0; j < a.keys; j++)
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) {
      float* p = a.scores + (long(j) * N + n) * LANES;
      const V score = load(p), e = score == -__builtin_inff() ? V{} : exponential(score - most[n]);
      total[n] += e;
      store(p, e);
    }
  for (int n = 0; n < N; n++) total[n] = total[n] > 0.0f ? 1.0f / total[n] : V{};
  for (int d = 0; d < a.width; d += kPanel) {
    V sums[kPanel][N];
    panel_product<N>(sums, a.value + long(d) * a.keys, a.scores, N * LANES, a.keys);
#pragma GCC unroll 8
    for (int m = 0; m < kPanel; m++) {
      if (d + m >= a.width) break;
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) store(a.out + (d + m) * a.out_step + long(first + n) * LANES, sums[m][n] * total[n]);
    }
  }
}

static void attend(const AttendArgs& a) {
  const int vectors = (a.queries + LANES - 1) / LANES;
  int first = 0;
  for (; first + kMostVectors <= vectors; first += kMostVectors) attend_some<kMostVectors>(a, first);
  switch (vectors - first) {
#ifdef MANY_REGISTERS
    case 3: return attend_some<3>(a, first);
    case 2: return attend_some<2>(a, first);
#endif
    case 1: return attend_some<1>(a, first);
  }
}

}  // namespace ISA
