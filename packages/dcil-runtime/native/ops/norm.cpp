// Norms by the image's own statistics: of every pixel's channels, or of groups of channels over all pixels.
#include "../cost.h"
#include "../execute.h"
#include "../planner.h"

namespace dcil {

namespace {

class Norm final : public Step {
 public:
  Norm(const Op& op, int from, int to) : Step(operator_of(op.kind).name, &op, {from}, to) {}
  void add_cost(const Program& p, Cost& cost) const override {
    const Value& to = p.values[size_t(out)];
    const double vectors = to.geometry.flat ? 1 : double(to.layout->vectors());
    cost.work += 4 * vectors * p.lanes.count * to.shape.c;
  }
  int replaceable() const override { return in[0]; }
  void run(const Member& m) const override;

 private:
  NormArgs arguments(const Member& m) const;
};

NormArgs Norm::arguments(const Member& m) const {
  const Layout& to = layout(m, out);
  NormArgs a{};
  a.in = m.arena.planes(in[0]);
  a.out = m.arena.planes(out);
  a.scale = op->scale.empty() ? nullptr : op->scale.data();
  a.shift = op->scale.empty() ? nullptr : op->shift.data();
  a.eps = op->number;
  a.c1 = a.channels = to.shape.c;
  a.y1 = to.geometry.height;
  a.width = to.geometry.width;
  a.images = to.lanes.images;
  a.pixels = long(to.shape.h) * to.shape.w;
  a.act = op->act;
  a.mask = to.mask();
  return a;
}

void Norm::run(const Member& m) const {
  NormArgs a = arguments(m);
  if (op->kind == Kind::LayerNorm && !layout(m, out).geometry.flat) {
    const Range rows = share(a.y1, m);
    a.y0 = rows.begin;
    a.y1 = rows.end;
    m.program.kernels.norm_pixels(a);
    return exchange(m, out, nullptr, 0, a.channels, rows);
  }
  const Range own = share(op->groups, m);
  const int width = a.channels / op->groups;
  for (int g = own.begin; g < own.end; g++) {
    a.c0 = g * width;
    a.c1 = a.c0 + width;
    (layout(m, out).geometry.flat ? m.program.kernels.norm_flat : m.program.kernels.norm_planes)(a);
  }
  if (!layout(m, out).geometry.flat) exchange(m, out, {own.begin * width, own.end * width});
}

Shape norm_shape(Op& op, const std::vector<Shape>& in) {
  require(op.groups == 1 || op.kind == Kind::GroupNorm, "only a group norm has groups");
  require(in[0].c % op.groups == 0, "channels do not divide by groups");
  require(op.scale.empty() || op.scale.size() == size_t(in[0].c), "a scale has another length than its channels");
  require(op.shift.size() == op.scale.size(), "scale and shift differ in length");
  return in[0];
}

void plan_norm(Planner& planner, const Op& op) {
  const Shape shape = planner.shape_of(op.out);
  int in = planner.value_of(op.in[0]);
  if (shape.h == 1 && shape.w == 1) in = planner.flat(in);
  planner.set_value(op.out, planner.add_value(shape, bare(planner.value(in).geometry), clamps_at_zero(op.act)));
  planner.add_step<Norm>(op, in, planner.value_of(op.out));
}

}  // namespace

extern const Operator kLayerNorm = {"layernorm", 1, 1, false, false, norm_shape, plan_norm};
extern const Operator kGroupNorm = {"groupnorm", 1, 1, false, false, norm_shape, plan_norm};

}  // namespace dcil
