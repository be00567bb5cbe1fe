// The mean over the pixels.
#include "../cost.h"
#include "../execute.h"
#include "../planner.h"

namespace dcil {

namespace {

class Mean final : public Step {
 public:
  Mean(const Op& op, int from, int to) : Step("mean", &op, {from}, to) {}
  void add_cost(const Program& p, Cost& cost) const override {
    const Value& from = p.values[size_t(in[0])];
    cost.work += double(from.layout->vectors()) * p.lanes.count * from.shape.c;
  }
  void run(const Member& m) const override {
    const Layout& from = layout(m, in[0]);
    const Range own = share(from.shape.c, m);
    const float share_of_one = 1.0f / float(long(from.shape.h) * from.shape.w);
    m.program.kernels.mean({m.arena.planes(in[0]), own.begin, own.end, from.geometry.height, from.geometry.width,
                            from.lanes.images, from.shape.c, share_of_one, m.arena.value(out)});
  }
};

Shape mean_shape(Op&, const std::vector<Shape>& in) { return {in[0].c, 1, 1}; }

void plan_mean(Planner& planner, const Op& op) {
  const int in = planner.value_of(op.in[0]);
  if (planner.value(in).geometry.flat) return planner.set_value(op.out, in);
  const bool nonnegative = planner.value(in).nonnegative;
  planner.set_value(op.out, planner.add_value(planner.shape_of(op.out), flat_geometry(), nonnegative));
  planner.add_step<Mean>(op, in, planner.value_of(op.out));
}

}  // namespace

extern const Operator kMean = {"mean", 1, 1, false, false, mean_shape, plan_mean};

}  // namespace dcil
