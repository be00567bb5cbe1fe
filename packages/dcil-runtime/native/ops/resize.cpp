// Weighted sums of an image's rows, or of its columns, the same in every channel: upsampling, and averages over windows
// that do not divide. Kept weights lie in [output row][input row], as a linear layer's.
#include "../cost.h"
#include "../planner.h"
#include "places.h"

namespace dcil {

namespace {

class Resize final : public Step {
 public:
  Resize(const Op& op, int from, int to) : Step(operator_of(op.kind).name, &op, {from}, to) {}
  void add_cost(const Program& p, Cost& cost) const override;
  void build(const Program& p) override;
  void run(const Member& m) const override;
  long bytes() const override { return from_.bytes() + to_.bytes() + long(side_.size()) * 4; }
  long macs(const Program& p) const override {
    const Shape& to = p.values[size_t(out)].shape;
    return long(op->weight.size()) * to.c * (op->kind == Kind::Rows ? to.w : to.h) * p.lanes.images;
  }

 private:
  void one_row(const float* from, float* to, int y) const;
  void one_column(const float* from, float* to, int x) const;

  Places from_, to_;
  std::vector<int32_t> side_;  // of every weight: the input row or column
  Shape in_, out_;
};

void Resize::add_cost(const Program& p, Cost& cost) const {
  const Layout &from = *p.values[size_t(in[0])].layout, &to = *p.values[size_t(out)].layout;
  cost.tables += Places::bytes(from) + Places::bytes(to) + 4.0 * double(op->weight.size());
  const double across = op->kind == Kind::Rows ? to.shape.w : to.shape.h;
  cost.work += (2 * double(op->weight.size()) * across + double(to.shape.h) * to.shape.w) * to.shape.c * p.lanes.images;
}

void Resize::build(const Program& p) {
  from_.build(*p.values[size_t(in[0])].layout);
  to_.build(*p.values[size_t(out)].layout);
  in_ = p.values[size_t(in[0])].shape;
  out_ = p.values[size_t(out)].shape;
  const uint32_t sides = uint32_t(op->kind == Kind::Rows ? in_.h : in_.w);
  for (uint32_t index : op->index) side_.push_back(int32_t(index % sides));
}

void Resize::one_row(const float* from, float* to, int y) const {
  for (int x = 0; x < out_.w; x++) {
    float sum = 0;
    for (int64_t i = op->start[size_t(y)]; i < op->start[size_t(y) + 1]; i++)
      sum += op->weight[size_t(i)] * from[from_.at[size_t(side_[size_t(i)]) * size_t(in_.w) + size_t(x)]];
    to[to_.at[size_t(y) * size_t(out_.w) + size_t(x)]] = sum;
  }
}

void Resize::one_column(const float* from, float* to, int x) const {
  for (int y = 0; y < out_.h; y++) {
    float sum = 0;
    for (int64_t i = op->start[size_t(x)]; i < op->start[size_t(x) + 1]; i++)
      sum += op->weight[size_t(i)] * from[from_.at[size_t(y) * size_t(in_.w) + size_t(side_[size_t(i)])]];
    to[to_.at[size_t(y) * size_t(out_.w) + size_t(x)]] = sum;
  }
}

void Resize::run(const Member& m) const {
  const Range own = share(out_.c, m);
  float* const floats = m.arena.value(out);
  to_.clear(floats, own);
  for (int c = own.begin; c < own.end; c++)
    for (int n = 0; n < layout(m, out).lanes.images; n++) {
      const float* from = m.arena.value(in[0]) + c * from_.plane + n * from_.image;
      float* to = floats + c * to_.plane + n * to_.image;
      if (op->kind == Kind::Rows)
        for (int y = 0; y < out_.h; y++) one_row(from, to, y);
      else
        for (int x = 0; x < out_.w; x++) one_column(from, to, x);
    }
  exchange(m, out, own);
}

Shape resize_shape(Op& op, const std::vector<Shape>& in) {
  const bool rows = op.kind == Kind::Rows;
  require(op.shape.c == in[0].c && (rows ? op.shape.w == in[0].w : op.shape.h == in[0].h), "only one side may change");
  check_weights(op, rows ? op.shape.h : op.shape.w, rows ? in[0].h : in[0].w);
  return op.shape;
}

void plan_resize(Planner& planner, const Op& op) {
  const int in = planner.spatial(planner.value_of(op.in[0]));
  planner.set_value(op.out, planner.add_value(op.shape, planner.even_tiles(op.shape), false));
  planner.add_step<Resize>(op, in, planner.value_of(op.out));
}

}  // namespace

extern const Operator kRows = {"rows", 1, 1, false, false, resize_shape, plan_resize};
extern const Operator kColumns = {"columns", 1, 1, false, false, resize_shape, plan_resize};

}  // namespace dcil
