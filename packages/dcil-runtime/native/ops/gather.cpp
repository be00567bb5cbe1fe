#include "gather.h"

#include "../cost.h"
#include "../planner.h"

namespace dcil {

void Gather::add_cost(const Program& p, Cost& cost) const {
  const Value& to = p.values[size_t(out)];
  cost.tables += table_entries(*to.layout) * 4;
  cost.work += table_entries(*to.layout) * to.shape.c;
}

void Gather::build(const Program& p) {
  const Layout &from = *p.values[size_t(in[0])].layout, &to = *p.values[size_t(out)].layout;
  table_ = gather_table(to, [&](int image, int y, int x) { return from.address(image, y * sy_, x * sx_); });
}

void Gather::run(const Member& m) const {
  const Layout& from = layout(m, in[0]);
  const long step = from.geometry.flat ? 1 : from.plane();
  gather_channels(m, out, share(from.shape.c, m), m.arena.value(in[0]), step, table_, INT32_MAX);
}

void Flatten::add_cost(const Program& p, Cost& cost) const {
  cost.work += double(p.values[size_t(in[0])].shape.size()) * p.lanes.images;
}

void Flatten::run(const Member& m) const {
  copy_images(m, in[0], m.program.lanes.images, share(layout(m, in[0]).shape.c, m), m.arena.value(out));
}

namespace {

Shape flatten_shape(Op&, const std::vector<Shape>& in) { return {int(in[0].size()), 1, 1}; }

void plan_flatten(Planner& planner, const Op& op) {
  planner.set_value(op.out, planner.flat(planner.value_of(op.in[0])));
}

}  // namespace

extern const Operator kFlatten = {"flatten", 1, 1, false, false, flatten_shape, plan_flatten};

}  // namespace dcil
