#include "planner.h"

#include <algorithm>
#include <limits>

#include "ops/convert.h"
#include "ops/gather.h"

namespace dcil {

namespace {

int ceil_div(int a, int b) { return (a + b - 1) / b; }

void widen(Geometry& g, const Geometry& need) {
  g.top = std::max(g.top, need.top);
  g.left = std::max(g.left, need.left);
  g.bottom = std::max(g.bottom, need.bottom);
  g.right = std::max(g.right, need.right);
}

/// Sub-tile sizes along one side: the output's, and the input's, which must be `stride` times as large. The input's
/// present size is kept when it fits without much waste, because keeping it saves a copy.
void side_tiles(int present, int stride, int wanted, int& in, int& out) {
  out = wanted;
  if (present % stride == 0 && present / stride >= wanted && present / stride <= wanted + wanted / 4)
    out = present / stride;
  in = out * stride;
}

}  // namespace

bool clamps_at_zero(const Activation& act) {
  return (act.kind == Act::Clamp && act.a >= 0) || act.kind == Act::Sigmoid || act.kind == Act::Hardsigmoid ||
         act.kind == Act::Sqrt;
}

bool skips_pixels(const Window& w) {
  return w.kh * w.kw == 1 && w.sy * w.sx > 1 && w.top + w.left + w.bottom + w.right == 0;
}

void Planner::plan() {
  const auto& shapes = p_.graph.shapes();
  value_of_.assign(shapes.size(), -1);
  bytes_of_.assign(shapes.size(), -1);
  for (int i = 0; i < p_.graph.inputs(); i++) {
    const bool whole = p_.graph.type(i) == Type::Int64;
    value_of_[size_t(i)] = add_value(shapes[size_t(i)], whole ? flat_geometry() : even_tiles(shapes[size_t(i)]), false);
  }
  for (const Op& op : p_.graph.ops()) {
    if (!plan_quantized(*this, op)) operator_of(op.kind).plan(*this, op);
    quantize(op.out);
    if (op.twin >= 0) quantize(op.twin);
  }
  for (int tensor : p_.graph.outputs()) p_.outputs.push_back(value_of(tensor));
}

/// A quantized tensor that was computed as floats is rounded to u8, for all that read it.
void Planner::quantize(int tensor) {
  const int from = value_of_[size_t(tensor)];
  if (!quant_of(tensor) || bytes_of(tensor) >= 0) return;
  const Value& v = value(from);
  const Geometry tiles = v.geometry.flat ? flat_geometry() : even_tiles(v.shape, byte_lanes(p_.lanes));
  set_bytes(tensor, add_bytes(v.shape, tiles, quant_of(tensor)));
  add_step<Quantize>(from, bytes_of(tensor));
  set_value(tensor, -1);
}

int Planner::value_of(int tensor) {
  int& value = value_of_[size_t(tensor)];
  if (value >= 0 || bytes_of(tensor) < 0) return value;
  const Shape shape = p_.values[size_t(bytes_of(tensor))].shape;
  const bool flat = p_.values[size_t(bytes_of(tensor))].geometry.flat;
  value = add_value(shape, flat ? flat_geometry() : even_tiles(shape), quant_of(tensor).zero == 0);
  add_step<Dequantize>(bytes_of(tensor), value);
  return value;
}

Geometry Planner::even_tiles(const Shape& shape, const Lanes& lanes) const {
  Geometry g;
  g.line = lanes.bytes == 4 && shape.h == 1 && shape.w > 1;
  const Lanes grid = g.line ? in_line(lanes) : lanes;
  g.height = ceil_div(shape.h, grid.rows);
  g.width = ceil_div(shape.w, grid.columns);
  return g;
}

int Planner::add_value(Shape shape, Geometry geometry, bool nonnegative) {
  p_.values.push_back({shape, geometry, nullptr, nonnegative, -1, {}});
  return int(p_.values.size()) - 1;
}

int Planner::add_bytes(Shape shape, Geometry geometry, const Quant& quant) {
  if (!geometry.flat) geometry.fill = float(quant.zero);
  p_.values.push_back({shape, geometry, nullptr, quant.zero == 0, -1, quant});
  return int(p_.values.size()) - 1;
}

/// A copy in another layout; consumers that need the same sub-tiles share it.
int Planner::copied(int value, Geometry geometry) {
  const auto key = std::make_tuple(value, geometry.height, geometry.width, geometry.line, geometry.fill);
  const auto known = copies_.find(key);
  if (known != copies_.end()) {
    widen(p_.values[known->second].geometry, geometry);
    return known->second;
  }
  const int copy = add_value(p_.values[value].shape, geometry, p_.values[value].nonnegative);
  p_.values[copy].quant = p_.values[value].quant;
  if (p_.values[copy].quant)
    add_step<GatherBytes>(value, copy);
  else
    add_step<Gather>(value, copy);
  copies_[key] = copy;
  return copy;
}

int Planner::spatial(int value) {
  const Value& v = p_.values[value];
  if (!v.geometry.flat) return value;
  Geometry tiles = even_tiles(v.shape, p_.lanes_of(v));
  tiles.fill = float(v.quant.zero);
  return copied(value, tiles);
}

int Planner::flat(int value) {
  if (p_.values[value].geometry.flat) return value;
  const auto [known, added] = copies_.try_emplace({value, 0, 0, false, 0.0f}, int(p_.values.size()));
  if (!added) return known->second;
  const Shape from = p_.values[value].shape;
  const int out = add_value({int(from.size()), 1, 1}, flat_geometry(), p_.values[value].nonnegative);
  add_step<Flatten>(value, out);
  return out;
}

int Planner::with_tiles(int value, const Geometry& tiles) {
  if (p_.values[value].geometry.same_tiles(tiles)) return value;
  if (tiles.flat) return flat(value);
  Geometry geometry = bare(tiles);
  geometry.fill = float(p_.values[value].quant.zero);
  return copied(value, geometry);
}

Geometry Planner::window_input(const Op& op, int value, Geometry& out) const {
  const Window& w = op.window;
  const Geometry& present = p_.values[value].geometry;
  const Lanes& lanes = p_.lanes_of(p_.values[value]);
  const Shape &from = p_.graph.shapes()[size_t(op.in[0])], &to = p_.graph.shapes()[size_t(op.out)];
  Geometry wanted = even_tiles(to, lanes), in;
  in.fill = float(p_.values[value].quant.zero);
  out = Geometry();
  in.line = out.line = even_tiles(from, lanes).line && to.h == 1;  // both in the same lanes
  if (in.line != wanted.line) {
    const Lanes grid = in.line ? in_line(lanes) : lanes;
    wanted.height = ceil_div(to.h, grid.rows);
    wanted.width = ceil_div(to.w, grid.columns);
  }
  side_tiles(present.height, w.sy, wanted.height, in.height, out.height);
  side_tiles(present.width, w.sx, wanted.width, in.width, out.width);
  in.top = w.top;
  in.left = w.left;
  in.bottom = std::max(0, (w.kh - 1) * w.dy - w.top - (w.sy - 1));
  in.right = std::max(0, (w.kw - 1) * w.dx - w.left - (w.sx - 1));
  return in;
}

bool Planner::copies(int value, const Geometry& need) const {
  return !p_.values[value].geometry.same_tiles(need) && !copies_.count({value, need.height, need.width, need.line, need.fill});
}

int Planner::with_window(int value, const Op& op, const Geometry& need) {
  const bool maximum = op.kind == Kind::MaxPool && !p_.values[value].nonnegative;
  if (maximum) {
    Geometry g = need;
    g.fill = p_.values[value].quant ? 0 : -std::numeric_limits<float>::infinity();
    return copied(value, g);
  }
  if (!p_.values[value].geometry.same_tiles(need)) return copied(value, need);
  widen(p_.values[value].geometry, need);
  return value;
}

}  // namespace dcil
