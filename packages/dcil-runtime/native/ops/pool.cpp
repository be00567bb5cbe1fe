// Maximum and average over a sliding window.
#include <algorithm>

#include "../cost.h"
#include "../execute.h"
#include "../planner.h"
#include "pool_window.h"

namespace dcil {

namespace {

class Pool final : public Step {
 public:
  Pool(const Op& op, int from, int to) : Step("pool", &op, {from}, to) {}
  void add_cost(const Program& p, Cost& cost) const override;
  void build(const Program& p) override;
  void run(const Member& m) const override;
  long bytes() const override { return long(distances_.size() + scale_.size()) * 4; }

 private:
  void build_scale(const Layout& in, const Layout& out);

  std::vector<int32_t> distances_;
  Aligned<float> scale_;  // average: 1 / count
};

void Pool::add_cost(const Program& p, Cost& cost) const {
  const Value& to = p.values[size_t(out)];
  const double taps = double(op->window.kh) * op->window.kw, plane = double(to.layout->vectors()) * p.lanes.count;
  cost.tables += taps * 4 + (op->kind == Kind::AvgPool ? plane * 4 : 0);
  cost.work += taps * plane * to.shape.c;
}

void Pool::build(const Program& p) {
  const Layout &from = *p.values[size_t(in[0])].layout, &to = *p.values[size_t(out)].layout;
  distances_ = taps_of(op->window, from, 4);
  if (op->kind == Kind::AvgPool) build_scale(from, to);
}

/// How many positions of the window at output `o` count: those in the image, or in the image and its padding, which
/// reaches `pad` beyond both ends (a window rounded up beyond that never counts).
int counted(int o, int size, int kernel, int stride, int before, int pad, bool count_pad) {
  const int begin = o * stride - before, end = std::min(begin + kernel, size + pad);
  return count_pad ? end - begin : std::min(end, size) - std::max(begin, 0);
}

void Pool::build_scale(const Layout& in, const Layout& out) {
  const Window& w = op->window;
  const bool pad = op->count_pad != 0;
  scale_.reserve(size_t(out.vectors()) * out.lanes.count);
  for (int y = 0; y < out.geometry.height; y++)
    for (int x = 0; x < out.geometry.width; x++)
      for (int lane = 0; lane < out.lanes.count; lane++) {
        const int row = lane / out.lanes.columns % out.lanes.rows, column = lane % out.lanes.columns;
        const int oy = row * out.geometry.height + y, ox = column * out.geometry.width + x;
        const int n = counted(oy, in.shape.h, w.kh, w.sy, w.top, w.top, pad) *
                      counted(ox, in.shape.w, w.kw, w.sx, w.left, w.left, pad);
        scale_.push_back(out.inside(lane, y, x) && n > 0 ? 1.0f / float(n) : 0.0f);
      }
}

void Pool::run(const Member& m) const {
  const Layout& to = layout(m, out);
  const Range own = share(to.shape.c, m);
  PoolArgs a{};
  a.in = m.arena.planes(in[0]);
  a.out = m.arena.planes(out);
  slide_window(a, op->window, to, own, distances_);
  a.scale = scale_.empty() ? nullptr : scale_.data();
  a.mask = to.mask();
  m.program.kernels.pool(a);
  exchange(m, out, own);
}

Shape pool_shape(Op& op, const std::vector<Shape>& in) { return slide(in[0], in[0].c, op.window); }

void plan_pool(Planner& planner, const Op& op) {
  planner.set_value(op.in[0], planner.spatial(planner.value_of(op.in[0])));
  Geometry out;
  const Geometry need = planner.window_input(op, out);
  const int in = planner.with_window(planner.value_of(op.in[0]), op, need);
  planner.set_value(op.out, planner.add_value(planner.shape_of(op.out), out, planner.value(in).nonnegative));
  planner.add_step<Pool>(op, in, planner.value_of(op.out));
}

}  // namespace

extern const Operator kMaxPool = {"maxpool", 1, 1, false, false, pool_shape, plan_pool};
extern const Operator kAvgPool = {"avgpool", 1, 1, false, false, pool_shape, plan_pool};

}  // namespace dcil
