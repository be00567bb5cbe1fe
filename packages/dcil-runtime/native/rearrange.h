// Pixels from one place to another: into halos, into other sub-tiles, and from images into lanes.
#pragma once
#include "kernels.h"
#include "finish.h"

namespace ISA {

using namespace dcil;

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

static void gather(const GatherArgs& g) {
  const int32_t* index = g.index;
  for (int y = 0; y < g.rows; y++)
    for (int x = 0; x < g.width; x++, index += LANES)
      store(g.to + y * g.row + x * LANES, load_each(g.from, index, g.limit, splat(g.fill)));
}

/// Every lane's pixels of a row follow each other in its image: LANES of them at a time turn from rows into columns.
static void interleave(const InterleaveArgs& a) {
  for (int y = 0; y < a.height; y++)
    for (int x = 0; x < a.width; x += LANES) {
      const int count = a.width - x < LANES ? a.width - x : LANES;
      const float* from = a.from + y * a.from_row + x;
      V v[LANES];
#pragma GCC unroll 16
      for (int l = 0; l < LANES; l++)
        v[l] = count == LANES ? load_anywhere(from + a.start[l]) : load_some(from + a.start[l], count);
      transpose(v);
#pragma GCC unroll 16
      for (int l = 0; l < LANES; l++)
        if (l < count) store(a.to + y * a.row + (x + l) * LANES, v[l]);
    }
}

}  // namespace ISA
