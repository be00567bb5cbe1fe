#include "planner.h"

#include <algorithm>
#include <limits>

namespace dcil {

namespace {

int ceil_div(int a, int b) { return (a + b - 1) / b; }

bool clamps_at_zero(const Activation& act) { return act.kind == Act::Clamp && act.a >= 0; }

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

void Planner::plan() {
  const auto& shapes = p_.graph.shapes();
  value_of_.assign(shapes.size(), -1);
  value_of_[0] = add_value(shapes[0], even_tiles(shapes[0]), false);
  for (const Op& op : p_.graph.ops()) switch (op.kind) {
      case Kind::Conv: conv(op); break;
      case Kind::MaxPool:
      case Kind::AvgPool: pool(op); break;
      case Kind::Map: map(op); break;
      case Kind::Concat: concat(op); break;
      case Kind::Mean:
      case Kind::Flatten: to_flat(op); break;
      case Kind::Linear: linear(op); break;
    }
  p_.output = value_of_[p_.graph.output()];
}

Geometry Planner::even_tiles(const Shape& shape) const {
  Geometry g;
  g.height = ceil_div(shape.h, p_.lanes.rows);
  g.width = ceil_div(shape.w, p_.lanes.columns);
  return g;
}

int Planner::add_value(Shape shape, Geometry geometry, bool nonnegative) {
  p_.values.push_back({shape, geometry, nullptr, nonnegative, -1});
  return int(p_.values.size()) - 1;
}

Step& Planner::add_step(Work work, const Op* op, std::vector<int> in, int out) {
  Step step;
  step.work = work;
  step.op = op;
  step.in = std::move(in);
  step.out = out;
  p_.steps.push_back(std::move(step));
  return p_.steps.back();
}

/// A copy in another layout; consumers that need the same sub-tiles share it.
int Planner::copied(int value, Geometry geometry) {
  const auto known = copies_.find({value, geometry.height, geometry.width, geometry.fill});
  if (known != copies_.end()) {
    widen(p_.values[known->second].geometry, geometry);
    return known->second;
  }
  const int copy = add_value(p_.values[value].shape, geometry, p_.values[value].nonnegative);
  add_step(Work::Gather, nullptr, {value}, copy);
  copies_[{value, geometry.height, geometry.width, geometry.fill}] = copy;
  return copy;
}

int Planner::spatial(int value) {
  return p_.values[value].geometry.flat ? copied(value, even_tiles(p_.values[value].shape)) : value;
}

int Planner::flat(int value) {
  if (p_.values[value].geometry.flat) return value;
  Geometry g;
  g.flat = true;
  const Shape from = p_.values[value].shape;
  const int out = add_value({int(from.size()), 1, 1}, g, p_.values[value].nonnegative);
  add_step(Work::Flatten, nullptr, {value}, out);
  return out;
}

int Planner::with_tiles(int value, const Geometry& tiles) {
  if (p_.values[value].geometry.same_tiles(tiles)) return value;
  if (tiles.flat) return flat(value);
  Geometry g;
  g.height = tiles.height;
  g.width = tiles.width;
  return copied(value, g);
}

/// The layout a window needs of its input, given the input's present one; `out` receives the output's.
Geometry Planner::window_input(const Op& op, Geometry& out) const {
  const Window& w = op.window;
  const Geometry& present = p_.values[value_of_[op.in[0]]].geometry;
  const Geometry wanted = even_tiles(p_.graph.shapes()[op.out]);
  Geometry in;
  out = Geometry();
  side_tiles(present.height, w.sy, wanted.height, in.height, out.height);
  side_tiles(present.width, w.sx, wanted.width, in.width, out.width);
  in.top = w.top;
  in.left = w.left;
  in.bottom = std::max(0, (w.kh - 1) * w.dy - w.top - (w.sy - 1));
  in.right = std::max(0, (w.kw - 1) * w.dx - w.left - (w.sx - 1));
  return in;
}

/// The value itself with a wide enough halo, or a copy in the needed layout.
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

void Planner::conv(const Op& op) {
  value_of_[op.in[0]] = spatial(value_of_[op.in[0]]);
  Geometry out;
  const Geometry need = window_input(op, out);
  const int in = with_window(value_of_[op.in[0]], op, need);
  const int residual = op.residual < 0 ? -1 : with_tiles(spatial(value_of_[op.residual]), out);
  const Shape shape = p_.graph.shapes()[op.out];
  value_of_[op.out] = add_value(shape, out, clamps_at_zero(op.act));
  if (op.twin >= 0) value_of_[op.twin] = add_value(shape, out, clamps_at_zero(op.twin_act));
  Step& step = add_step(Work::Conv, &op, {in}, value_of_[op.out]);
  step.residual = residual;
  step.twin = op.twin < 0 ? -1 : value_of_[op.twin];
}

void Planner::pool(const Op& op) {
  value_of_[op.in[0]] = spatial(value_of_[op.in[0]]);
  Geometry out;
  const Geometry need = window_input(op, out);
  const int in = with_window(value_of_[op.in[0]], op, need);
  const bool nonnegative = p_.values[in].nonnegative;
  value_of_[op.out] = add_value(p_.graph.shapes()[op.out], out, nonnegative);
  add_step(Work::Pool, &op, {in}, value_of_[op.out]);
}

void Planner::map(const Op& op) {
  const int first = value_of_[op.in[0]];
  Geometry tiles = p_.values[first].geometry;
  Geometry out;
  out.flat = tiles.flat;
  out.height = tiles.height;
  out.width = tiles.width;
  std::vector<int> in = {first};
  if (op.in.size() == 2) {
    const int second = value_of_[op.in[1]];
    in.push_back(with_tiles(out.flat ? second : spatial(second), out));
  }
  value_of_[op.out] = add_value(p_.graph.shapes()[op.out], out, clamps_at_zero(op.act));
  add_step(Work::Map, &op, in, value_of_[op.out]);
}

void Planner::concat(const Op& op) {
  const Geometry first = p_.values[value_of_[op.in[0]]].geometry;
  Geometry out;
  out.flat = first.flat;
  out.height = first.height;
  out.width = first.width;
  bool nonnegative = true;
  std::vector<int> in;
  for (int t : op.in) {
    in.push_back(with_tiles(out.flat ? value_of_[t] : spatial(value_of_[t]), out));
    nonnegative &= p_.values[in.back()].nonnegative;
  }
  value_of_[op.out] = add_value(p_.graph.shapes()[op.out], out, nonnegative);
  int channel = 0;
  for (int v : in) {
    add_step(Work::Copy, &op, {v}, value_of_[op.out]).channel = channel;
    channel += p_.values[v].shape.c;
  }
}

void Planner::to_flat(const Op& op) {
  const int in = value_of_[op.in[0]];
  if (p_.values[in].geometry.flat || op.kind == Kind::Flatten) {
    value_of_[op.out] = flat(in);
    return;
  }
  Geometry g;
  g.flat = true;
  value_of_[op.out] = add_value(p_.graph.shapes()[op.out], g, p_.values[in].nonnegative);
  add_step(Work::Mean, &op, {in}, value_of_[op.out]);
}

void Planner::linear(const Op& op) {
  const int in = flat(value_of_[op.in[0]]);
  const int residual = op.residual < 0 ? -1 : flat(value_of_[op.residual]);
  Geometry g;
  g.flat = true;
  value_of_[op.out] = add_value(p_.graph.shapes()[op.out], g, clamps_at_zero(op.act));
  add_step(Work::Linear, &op, {in}, value_of_[op.out]).residual = residual;
}

}  // namespace dcil
