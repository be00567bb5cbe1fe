// What pooling floats and pooling bytes have in common: the taps of the window, and how it slides.
#pragma once
#include "../execute.h"

namespace dcil {

/// How far each tap of the window lies from its first, in bytes, `size` for a number.
inline std::vector<int32_t> taps_of(const Window& w, const Layout& from, int size) {
  std::vector<int32_t> found;
  found.reserve(size_t(w.kh) * size_t(w.kw));
  for (int ky = 0; ky < w.kh; ky++)
    for (int kx = 0; kx < w.kw; kx++)
      found.push_back(int32_t((long(ky) * w.dy * from.row() + long(kx) * w.dx * from.lanes.count) * size));
  return found;
}

/// Sets how the window slides from `a.in`, which is set, over the channels `own` of the output.
template <class Args>
void slide_window(Args& a, const Window& w, const Layout& to, Range own, const std::vector<int32_t>& taps) {
  a.in.data -= w.top * a.in.row + long(w.left) * to.lanes.count;
  a.row_step = a.in.row * w.sy;
  a.column_step = long(to.lanes.count) * w.sx;
  a.c0 = own.begin;
  a.c1 = own.end;
  a.y1 = to.geometry.height;
  a.width = to.geometry.width;
  a.distances = taps.data();
  a.taps = int(taps.size());
}

}  // namespace dcil
