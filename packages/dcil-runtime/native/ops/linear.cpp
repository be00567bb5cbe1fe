// A linear layer on vectors: out[n][o] = act(bias[o] + sum_i w[o][i] in[n][i] + residual[n][o]).
#include <algorithm>

#include "../cost.h"
#include "../planner.h"
#include "../tune.h"

namespace dcil {

namespace {

class Linear final : public Step {
 public:
  Linear(const Op& op, int from, int to) : Step("linear", &op, {from}, to) {}
  void add_cost(const Program& p, Cost& cost) const override;
  void tune(Tuner& tuner) override;
  void run(const Member& m) const override;
  long bytes() const override { return long(dense_.size() + start_.size() + column_.size()) * 4; }

 private:
  // Dense weights, or kept ones by row.
  std::vector<float> dense_;
  std::vector<int32_t> start_, column_;
};

void Linear::add_cost(const Program& p, Cost& cost) const {
  const double inputs = p.values[size_t(in[0])].shape.c, outputs = p.values[size_t(out)].shape.c;
  const double dense = inputs * outputs * 4, kept = double(op->weight.size()) * 4 + outputs * 4;
  cost.tables += std::max(dense, kept);
  cost.passing = std::max(cost.passing, dense + 2 * kept);
  cost.work += inputs * outputs * p.lanes.images;
}

/// Dense rows or kept weights only, whichever is faster.
void Linear::tune(Tuner& tuner) {
  const size_t inputs = size_t(tuner.program().values[size_t(in[0])].shape.c);
  for (int64_t s : op->start) start_.push_back(int32_t(s));
  for (uint32_t i : op->index) column_.push_back(int32_t(i % inputs));
  const double kept = tuner.measure(*this, 3);
  dense_.assign(op->bias.size() * inputs, 0.0f);
  for (size_t i = 0; i < op->index.size(); i++) dense_[op->index[i]] = op->weight[i];
  if (tuner.measure(*this, 3) < kept) {
    start_ = column_ = {};
  } else {
    dense_ = {};
  }
}

void Linear::run(const Member& m) const {
  LinearArgs a{};
  a.in = m.arena.value(in[0]);
  a.out = m.arena.value(out);
  a.residual = residual < 0 ? nullptr : m.arena.value(residual);
  a.dense = dense_.empty() ? nullptr : dense_.data();
  a.start = start_.data();
  a.column = column_.data();
  a.weight = op->weight.data();
  a.bias = op->bias.data();
  a.images = m.program.lanes.images;
  a.inputs = m.program.values[size_t(in[0])].shape.c;
  a.outputs = m.program.values[size_t(out)].shape.c;
  const Range own = share(a.outputs, m);
  a.o0 = own.begin;
  a.o1 = own.end;
  a.act = op->act;
  m.program.kernels.linear(a);
}

Shape linear_shape(Op& op, const std::vector<Shape>& in) {
  require(in[0].h == 1 && in[0].w == 1, "a linear layer's input is not flat");
  check_weights(op, int(op.bias.size()), in[0].c);
  return {int(op.bias.size()), 1, 1};
}

void plan_linear(Planner& planner, const Op& op) {
  const int in = planner.flat(planner.value_of(op.in[0]));
  const int residual = op.residual < 0 ? -1 : planner.flat(planner.value_of(op.residual));
  planner.set_value(op.out, planner.add_value(planner.shape_of(op.out), flat_geometry(), clamps_at_zero(op.act)));
  planner.add_step<Linear>(op, in, planner.value_of(op.out)).residual = residual;
}

}  // namespace

extern const Operator kLinear = {"linear", 1, 1, true, false, linear_shape, plan_linear};

}  // namespace dcil
