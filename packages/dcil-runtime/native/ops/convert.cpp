#include "convert.h"

#include <algorithm>

#include "../cost.h"

namespace dcil {

Store store_of(const Quant& quant) { return {quant.scale, float(1 / double(quant.scale)), float(quant.zero), 0, 255}; }

void exchange_bytes(const Member& m, int value, const int32_t* channels, int first, int count, Range rows) {
  const Layout& l = layout(m, value);
  if (l.moves.empty()) return;
  const Move* moves = l.moves.data();
  m.program.kernels.quant->exchange({m.arena.byte_planes(value), channels, first, count,
                                     moves + l.moves_of_row[size_t(rows.begin)],
                                     moves + l.moves_of_row[size_t(rows.end)], l.byte_orders.data(),
                                     uint8_t(l.geometry.fill)});
}

void exchange_bytes(const Member& m, int value, Range channels) {
  const int height = m.program.values[size_t(value)].geometry.height;
  exchange_bytes(m, value, nullptr, channels.begin, channels.end - channels.begin, {0, height});
}

namespace {

/// What a table of a plane covers: with its halo, where that is gathered too.
struct Covered {
  explicit Covered(const Layout& l)
      : halo(l.gathers_halo()), rows(l.geometry.height + halo * (l.geometry.top + l.geometry.bottom)),
        width(l.geometry.width + halo * (l.geometry.left + l.geometry.right)) {}
  bool halo;
  int rows, width;  // vectors
};

void add_table(const Program& p, int out, Cost& cost) {
  const Value& to = p.values[size_t(out)];
  if (to.geometry.flat) {
    cost.tables += 4.0 * (double(to.shape.c) * p.lanes.images + 64);
    cost.work += double(to.shape.c) * p.lanes.images;
    return;
  }
  cost.tables += table_entries(*to.layout) * 4;
  cost.passing = std::max(cost.passing, table_entries(*to.layout) * 4);
  cost.work += table_entries(*to.layout) * to.shape.c;
}

std::vector<int32_t> table_between(const Program& p, int in, int out, int sy = 1, int sx = 1) {
  const Layout &from = *p.values[size_t(in)].layout, &to = *p.values[size_t(out)].layout;
  return gather_table(to, [&](int image, int y, int x) { return from.address(image, y * sy, x * sx); });
}

/// From one channel of a value to the next.
long channel_step(const Layout& l) { return l.geometry.flat ? 1 : l.plane(); }

}  // namespace

void Quantize::add_cost(const Program& p, Cost& cost) const { add_table(p, out, cost); }

/// Is a sub-tile of u8 a quarter of one of floats?
bool Quantize::halves(const Program& p) const {
  const Layout &from = *p.values[size_t(in[0])].layout, &to = *p.values[size_t(out)].layout;
  const Geometry &g = from.geometry, &t = to.geometry;
  return !g.flat && !g.line && !t.flat && g.height == 2 * t.height && g.width == 2 * t.width && !to.has_mask() &&
         to.lanes.rows * t.height == to.shape.h && to.lanes.columns * t.width == to.shape.w;
}

void Quantize::build_order(const Program& p) {
  const Lanes &floats = p.lanes, &all = p.lanes_of(p.values[size_t(out)]);
  std::vector<int> byte_at(size_t(all.count));
  for (int place = 0; place < all.count; place++) byte_at[size_t(place)] = p.kernels.quant->order(place);
  for (int lane = 0; lane < all.count; lane++) {
    const int image = lane / (all.rows * all.columns), row = lane / all.columns % all.rows, column = lane % all.columns;
    const int from = (image * floats.rows + row / 2) * floats.columns + column / 2, part = row % 2 * 2 + column % 2;
    order_.push_back(uint8_t(byte_at[size_t(part * floats.count + from)]));
  }
}

void Quantize::build(const Program& p) {
  if (halves(p)) return build_order(p);
  const Layout& to = *p.values[size_t(out)].layout;
  const size_t lanes = size_t(p.lanes_of(p.values[size_t(out)]).count);
  std::vector<int32_t> plain;
  if (to.geometry.flat) {
    for (long i = 0; i < long(to.shape.c) * p.lanes.images; i++) plain.push_back(int32_t(i));
    plain.resize((plain.size() + lanes - 1) / lanes * lanes, -1);
  } else {
    plain = table_between(p, in[0], out);
  }
  table_.reserve(plain.size());
  for (size_t vector = 0; vector < plain.size(); vector += lanes)
    for (size_t place = 0; place < lanes; place++)
      table_.push_back(plain[vector + size_t(p.kernels.quant->order(int(place)))]);
}

/// All vectors of all images in one row.
void Quantize::run_flat(const Member& m) const {
  if (m.part > 0) return;
  const int width = int(table_.size()) / layout(m, out).lanes.count;
  m.program.kernels.quant->quantize({m.arena.bytes(out), 0, 1, width, m.arena.value(in[0]), table_.data(),
                                     store_of(m.program.values[size_t(out)].quant)});
}

void Quantize::run(const Member& m) const {
  const Layout &from = layout(m, in[0]), &to = layout(m, out);
  if (to.geometry.flat) return run_flat(m);
  const Covered covered(to);
  const Range own = share(to.shape.c, m);
  const Store store = store_of(m.program.values[size_t(out)].quant);
  if (!order_.empty()) {
    const BytePlanes planes = m.arena.byte_planes(out);
    const Planes source = m.arena.planes(in[0]);
    for (int c = own.begin; c < own.end; c++)
      m.program.kernels.quant->quantize_tiles({{planes.data + c * planes.plane, 0, planes.row},
                                               {source.data + c * source.plane, 0, source.row},
                                               to.geometry.height, to.geometry.width, order_.data(), store});
    return exchange_bytes(m, out, own);
  }
  uint8_t* first = covered.halo ? m.arena.bytes(out) : m.arena.byte_planes(out).data;
  for (int c = own.begin; c < own.end; c++)
    m.program.kernels.quant->quantize({first + c * to.plane(), to.row(), covered.rows, covered.width,
                                       m.arena.value(in[0]) + c * channel_step(from), table_.data(), store});
  if (!covered.halo) exchange_bytes(m, out, own);
}

void Dequantize::add_cost(const Program& p, Cost& cost) const { add_table(p, out, cost); }

void Dequantize::build(const Program& p) {
  if (!p.values[size_t(out)].geometry.flat) table_ = table_between(p, in[0], out);
}

void Dequantize::run(const Member& m) const {
  const Layout &from = layout(m, in[0]), &to = layout(m, out);
  const Quant& quant = m.program.values[size_t(in[0])].quant;
  const auto real = [&](uint8_t q) { return float(int(q) - quant.zero) * quant.scale; };
  if (to.geometry.flat) {
    for (long i = 0; m.part == 0 && i < long(to.shape.c) * to.lanes.images; i++) m.arena.value(out)[i] = real(m.arena.bytes(in[0])[i]);
    return;
  }
  const Covered covered(to);
  const Range own = share(to.shape.c, m);
  const long width = long(covered.width) * to.lanes.count;
  for (int c = own.begin; c < own.end; c++) {
    const uint8_t* source = m.arena.bytes(in[0]) + c * channel_step(from);
    float* row = (covered.halo ? m.arena.value(out) : m.arena.planes(out).data) + c * to.plane();
    const int32_t* index = table_.data();
    for (int y = 0; y < covered.rows; y++, row += to.row(), index += width)
      for (long i = 0; i < width; i++) row[i] = index[i] < 0 ? 0.0f : real(source[index[i]]);
  }
  if (!covered.halo) exchange(m, out, own);
}

void GatherBytes::add_cost(const Program& p, Cost& cost) const { add_table(p, out, cost); }

void GatherBytes::build(const Program& p) { table_ = table_between(p, in[0], out, sy_, sx_); }

void GatherBytes::run(const Member& m) const {
  const Layout &from = layout(m, in[0]), &to = layout(m, out);
  const Covered covered(to);
  const Range own = share(to.shape.c, m);
  const long width = long(covered.width) * to.lanes.count;
  const uint8_t fill = uint8_t(to.geometry.fill);
  for (int c = own.begin; c < own.end; c++) {
    const uint8_t* source = m.arena.bytes(in[0]) + c * channel_step(from);
    uint8_t* row = (covered.halo ? m.arena.bytes(out) : m.arena.byte_planes(out).data) + c * to.plane();
    const int32_t* index = table_.data();
    for (int y = 0; y < covered.rows; y++, row += to.row(), index += width)
      for (long i = 0; i < width; i++) row[i] = index[i] < 0 ? fill : source[index[i]];
  }
  if (!covered.halo) exchange_bytes(m, out, own);
}

}  // namespace dcil
