#include "places.h"

namespace dcil {

void Places::build(const Layout& l) {
  const bool flat = l.geometry.flat;
  plane = flat ? 1 : l.plane();
  image = flat ? l.shape.c : long(l.lanes.rows) * l.lanes.columns;
  at.reserve(size_t(l.shape.h) * size_t(l.shape.w));
  for (int y = 0; y < l.shape.h; y++)
    for (int x = 0; x < l.shape.w; x++) at.push_back(int32_t(l.address(0, y, x)));
  if (flat || !l.has_mask()) return;
  const long origin = l.address(0, 0, 0);
  for (int y = 0; y < l.geometry.height; y++)
    for (int x = 0; x < l.geometry.width; x++)
      for (int lane = 0; lane < l.lanes.count; lane++)
        if (!l.inside(lane, y, x)) outside_.push_back(int32_t(origin + y * l.row() + long(x) * l.lanes.count + lane));
}

double Places::bytes(const Layout& l) {
  return 4 * (double(l.shape.h) * l.shape.w + (l.geometry.flat ? 0 : double(l.vectors()) * l.lanes.count));
}

void Places::clear(float* floats, Range channels) const {
  for (long c = channels.begin; c < channels.end; c++)
    for (int32_t place : outside_) floats[c * plane + place] = 0;
}

}  // namespace dcil
