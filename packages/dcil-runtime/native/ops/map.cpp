#include "map.h"

#include "../cost.h"
#include "../planner.h"

namespace dcil {

void Map::add_cost(const Program& p, Cost& cost) const {
  cost.work += double(p.values[size_t(out)].layout->vectors()) * p.lanes.count * p.values[size_t(in[0])].shape.c;
}

/// Vectors are short and rare: a scalar loop, then the activation through a linear layer without inputs.
void Map::run_flat(const Member& m) const {
  if (m.part > 0) return;
  const bool affine = !plain_ && !op->scale.empty();
  const int channels = m.program.values[size_t(in[0])].shape.c;
  const long to_row = m.program.values[size_t(out)].shape.c;
  for (int n = 0; n < m.program.lanes.images; n++) {
    const float* a = m.arena.value(in[0]) + long(n) * channels;
    float* to = m.arena.value(out) + n * to_row + channel_;
    for (int c = 0; c < channels; c++) to[c] = affine ? op->scale[size_t(c)] * a[c] + op->shift[size_t(c)] : a[c];
    LinearArgs one{};
    one.in = one.dense = one.bias = one.out = to;
    one.residual = in.size() == 2 ? m.arena.value(in[1]) + long(n) * channels : nullptr;
    one.images = 1;
    one.outputs = one.o1 = channels;
    if (!plain_) one.act = op->act;
    m.program.kernels.linear(one);
  }
}

void Map::run(const Member& m) const {
  if (m.program.values[size_t(out)].geometry.flat) return run_flat(m);
  const Layout& to = layout(m, out);
  const Range own = share(m.program.values[size_t(in[0])].shape.c, m);
  MapArgs a{};
  a.a = m.arena.planes(in[0]);
  if (in.size() == 2) a.b = m.arena.planes(in[1]);
  a.out = m.arena.planes(out);
  a.out.data += channel_ * a.out.plane;
  a.scale = op->scale.empty() ? nullptr : op->scale.data();
  a.shift = op->scale.empty() ? nullptr : op->shift.data();
  a.c0 = own.begin;
  a.c1 = own.end;
  a.y1 = to.geometry.height;
  a.width = to.geometry.width;
  if (!plain_) a.act = op->act;
  a.mask = to.mask();
  m.program.kernels.map(a);
  exchange(m, out, {own.begin + channel_, own.end + channel_});
}

namespace {

Shape map_shape(Op& op, const std::vector<Shape>& in) {
  require(in.size() == 1 || in[1] == in[0], "added tensors differ in shape");
  require(op.scale.empty() || op.scale.size() == size_t(in[0].c), "a scale has another length than its channels");
  require(op.shift.size() == op.scale.size(), "scale and shift differ in length");
  return in[0];
}

void plan_map(Planner& planner, const Op& op) {
  const Geometry out = bare(planner.value(planner.value_of(op.in[0])).geometry);
  std::vector<int> in;
  for (int tensor : op.in) in.push_back(planner.with_tiles(planner.value_of(tensor), out));
  planner.set_value(op.out, planner.add_value(planner.shape_of(op.out), out, clamps_at_zero(op.act)));
  planner.add_step<Map>("map", op, in, planner.value_of(op.out), false, 0);
}

}  // namespace

extern const Operator kMap = {"map", 1, 2, false, false, map_shape, plan_map};

}  // namespace dcil
