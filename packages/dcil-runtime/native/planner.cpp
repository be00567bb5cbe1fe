#include "planner.h"

#include <algorithm>
#include <limits>

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

void Planner::plan() {
  const auto& shapes = p_.graph.shapes();
  value_of_.assign(shapes.size(), -1);
  for (int i = 0; i < p_.graph.inputs(); i++) {
    const bool whole = p_.graph.type(i) == Type::Int64;
    value_of_[size_t(i)] = add_value(shapes[size_t(i)], whole ? flat_geometry() : even_tiles(shapes[size_t(i)]), false);
  }
  for (const Op& op : p_.graph.ops())
    require(!op.quant && !op.twin_quant, "quantized tensors can be read, but not yet run");
  for (const Op& op : p_.graph.ops()) operator_of(op.kind).plan(*this, op);
  for (int tensor : p_.graph.outputs()) p_.outputs.push_back(value_of_[size_t(tensor)]);
}

Geometry Planner::even_tiles(const Shape& shape) const {
  Geometry g;
  g.line = shape.h == 1 && shape.w > 1;
  const Lanes grid = g.line ? in_line(p_.lanes) : p_.lanes;
  g.height = ceil_div(shape.h, grid.rows);
  g.width = ceil_div(shape.w, grid.columns);
  return g;
}

int Planner::add_value(Shape shape, Geometry geometry, bool nonnegative) {
  p_.values.push_back({shape, geometry, nullptr, nonnegative, -1});
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
  add_step<Gather>(value, copy);
  copies_[key] = copy;
  return copy;
}

int Planner::spatial(int value) {
  return p_.values[value].geometry.flat ? copied(value, even_tiles(p_.values[value].shape)) : value;
}

int Planner::flat(int value) {
  if (p_.values[value].geometry.flat) return value;
  const Shape from = p_.values[value].shape;
  const int out = add_value({int(from.size()), 1, 1}, flat_geometry(), p_.values[value].nonnegative);
  add_step<Flatten>(value, out);
  return out;
}

int Planner::with_tiles(int value, const Geometry& tiles) {
  if (p_.values[value].geometry.same_tiles(tiles)) return value;
  if (tiles.flat) return flat(value);
  return copied(value, bare(tiles));
}

Geometry Planner::window_input(const Op& op, Geometry& out) const {
  const Window& w = op.window;
  const Geometry& present = p_.values[value_of_[op.in[0]]].geometry;
  const Shape &from = p_.graph.shapes()[size_t(op.in[0])], &to = p_.graph.shapes()[size_t(op.out)];
  Geometry wanted = even_tiles(to), in;
  out = Geometry();
  in.line = out.line = even_tiles(from).line && to.h == 1;  // both in the same lanes
  if (in.line != wanted.line) {
    const Lanes grid = in.line ? in_line(p_.lanes) : p_.lanes;
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

int Planner::with_window(int value, const Op& op, const Geometry& need) {
  const bool maximum = op.kind == Kind::MaxPool && !p_.values[value].nonnegative;
  if (maximum) {
    Geometry g = need;
    g.fill = -std::numeric_limits<float>::infinity();
    return copied(value, g);
  }
  if (!p_.values[value].geometry.same_tiles(need)) return copied(value, need);
  widen(p_.values[value].geometry, need);
  return value;
}

}  // namespace dcil
