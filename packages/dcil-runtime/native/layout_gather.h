#pragma once
// The one template of layout.h.
namespace dcil {

template <class Source>
std::vector<int32_t> gather_table(const Layout& to, Source source) {
  const Geometry& g = to.geometry;
  const Lanes& l = to.lanes;
  std::vector<int32_t> table;
  const int halo = to.gathers_halo();
  table.reserve(size_t(to.vectors() + halo * to.halo_vectors()) * l.count);
  for (int y = -g.top * halo; y < g.height + g.bottom * halo; y++)
    for (int x = -g.left * halo; x < g.width + g.right * halo; x++)
      for (int lane = 0; lane < l.count; lane++) {
        const int column = lane % l.columns, row = lane / l.columns % l.rows, image = lane / (l.columns * l.rows);
        const int py = row * g.height + y, px = column * g.width + x;
        const bool in = py >= 0 && py < to.shape.h && px >= 0 && px < to.shape.w;
        table.push_back(in ? int32_t(source(image, py, px)) : -1);
      }
  return table;
}

}  // namespace dcil
