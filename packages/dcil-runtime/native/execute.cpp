#include "execute.h"

namespace dcil {

void exchange(const Member& m, int value, const int32_t* channels, int first, int count, Range rows) {
  const Layout& l = layout(m, value);
  if (l.moves.empty()) return;
  const Move* moves = l.moves.data();
  m.program.kernels.exchange({m.arena.planes(value), channels, first, count, moves + l.moves_of_row[rows.begin],
                              moves + l.moves_of_row[rows.end], l.orders.data()});
}

void exchange(const Member& m, int value, Range channels) {
  const int height = m.program.values[value].geometry.height;
  exchange(m, value, nullptr, channels.begin, channels.end - channels.begin, {0, height});
}

void gather_channels(const Member& m, int value, Range own, const float* from, long step,
                     const std::vector<int32_t>& table,
                     int32_t limit) {
  const Layout& to = layout(m, value);
  const Geometry& g = to.geometry;
  const bool halo = to.gathers_halo();
  GatherArgs a{};
  a.row = to.row();
  a.rows = halo ? g.top + g.height + g.bottom : g.height;
  a.width = int(table.size()) / a.rows / to.lanes.count;
  a.index = table.data();
  a.limit = limit;
  a.fill = g.fill;
  for (int c = own.begin; c < own.end; c++) {
    a.to = (halo ? m.arena.value(value) : m.arena.planes(value).data) + c * to.plane();
    a.from = from + c * step;
    m.program.kernels.gather(a);
  }
  if (!halo) exchange(m, value, own);
}

void copy_images(const Member& m, int value, int count, Range channels, float* to) {
  const Layout& l = layout(m, value);
  const long step = l.geometry.flat ? 1 : l.plane(), size = l.shape.size();
  for (int n = 0; n < count; n++)
    for (int y = 0; y < l.shape.h; y++)
      for (int x = 0; x < l.shape.w; x++) {
        const float* from = m.arena.value(value) + l.address(n, y, x);
        float* p = to + n * size + long(y) * l.shape.w + x;
        for (long c = channels.begin; c < channels.end; c++) p[c * l.shape.h * l.shape.w] = from[c * step];
      }
}

namespace {

/// Whole numbers of `count` images become floats; images that are not there get zeros.
void load_numbers(const Member& m, int input, const int64_t* numbers, int count) {
  if (m.part > 0) return;
  const Layout& to = layout(m, input);
  float* out = m.arena.value(input);
  for (long i = 0; i < to.lanes.images * long(to.shape.c); i++) out[i] = i < count * long(to.shape.c) ? float(numbers[i]) : 0;
}

void load_images(const Member& m, int input, const float* images, int count) {
  const Layout& to = layout(m, input);
  const Geometry& g = to.geometry;
  const long plane = long(to.shape.h) * to.shape.w;
  const auto& table = m.program.input_tables[size_t(input)];
  const Range own = share(to.shape.c, m);
  if (to.mask() || count < to.lanes.images)  // somebody's pixels are not there
    return gather_channels(m, input, own, images, plane, table, int32_t(count * to.shape.size()));
  const Planes planes = m.arena.planes(input);
  for (int c = own.begin; c < own.end; c++)  // the table begins with every lane's first pixel
    m.program.kernels.interleave({planes.data + c * planes.plane, planes.row, images + c * plane, table.data(),
                                  to.shape.w, g.height, g.width});
  exchange(m, input, own);
}

}  // namespace

void load_inputs(const Member& m, const void* const* in, long first, int count) {
  for (int i = 0; i < m.program.graph.inputs(); i++) {
    const long begin = first * layout(m, i).shape.size();
    if (m.program.graph.type(i) == Type::Int64)
      load_numbers(m, i, static_cast<const int64_t*>(in[i]) + begin, count);
    else
      load_images(m, i, static_cast<const float*>(in[i]) + begin, count);
  }
}

void store_outputs(const Member& m, void* const* out, long first, int count) {
  if (m.part > 0) return;
  for (size_t i = 0; i < m.program.outputs.size(); i++) {
    const int value = m.program.outputs[i];
    const Shape& shape = layout(m, value).shape;
    copy_images(m, value, count, {0, shape.c}, static_cast<float*>(out[i]) + first * shape.size());
  }
}

}  // namespace dcil
