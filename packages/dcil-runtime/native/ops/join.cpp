// Sums, differences, products and quotients of two tensors; the second may have one number per channel, per pixel or per image.
#include "../cost.h"
#include "../execute.h"
#include "../planner.h"

namespace dcil {

namespace {

Join join_of(Kind kind) { return Join(int(Join::Add) + int(kind) - int(Kind::Add)); }
static_assert(int(Kind::Div) - int(Kind::Add) == int(Join::Div) - int(Join::Add), "both in the same order");

class Joined final : public Step {
 public:
  Joined(const Op& op, std::vector<int> in, int to) : Step(operator_of(op.kind).name, &op, std::move(in), to) {}
  void add_cost(const Program& p, Cost& cost) const override {
    const Value& to = p.values[size_t(out)];
    cost.work += double(to.layout->vectors()) * p.lanes.count * to.shape.c;
  }
  int replaceable() const override { return in[0]; }
  void run(const Member& m) const override;

 private:
  void run_flat(const Member& m) const;
};

/// Vectors are short: a scalar loop, then the activation through a linear layer without inputs.
void Joined::run_flat(const Member& m) const {
  if (m.part > 0) return;
  const Join kind = join_of(op->kind);
  const int channels = layout(m, out).shape.c, others = layout(m, in[1]).shape.c;
  for (int n = 0; n < m.program.lanes.images; n++) {
    const float *a = m.arena.value(in[0]) + long(n) * channels, *b = m.arena.value(in[1]) + long(n) * others;
    float* to = m.arena.value(out) + long(n) * channels;
    for (int c = 0; c < channels; c++) {
      const float x = a[c], y = b[others == 1 ? 0 : c];
      to[c] = kind == Join::Add ? x + y : kind == Join::Sub ? x - y : kind == Join::Mul ? x * y : x / y;
    }
    LinearArgs one{};
    one.in = one.dense = one.bias = one.out = to;
    one.images = 1;
    one.outputs = one.o1 = channels;
    one.act = op->act;
    m.program.kernels.linear(one);
  }
}

void Joined::run(const Member& m) const {
  const Layout &to = layout(m, out), &second = layout(m, in[1]);
  if (to.geometry.flat) return run_flat(m);
  const Range own = share(to.shape.c, m);
  JoinArgs a{};
  a.a = m.arena.planes(in[0]);
  a.out = m.arena.planes(out);
  if (second.geometry.flat) {
    a.each = m.arena.value(in[1]);
    a.each_image = second.shape.c;
    a.each_channel = second.shape.c > 1;
  } else {
    a.b = m.arena.planes(in[1]);
    if (second.shape.c == 1) a.b.plane = 0;
  }
  a.images = to.lanes.images;
  a.c0 = own.begin;
  a.c1 = own.end;
  a.y1 = to.geometry.height;
  a.width = to.geometry.width;
  a.kind = join_of(op->kind);
  a.act = op->act;
  a.mask = to.mask();
  m.program.kernels.join(a);
  exchange(m, out, own);
}

Shape join_shape(Op&, const std::vector<Shape>& in) {
  const bool pixels = in[1].h == in[0].h && in[1].w == in[0].w, one = in[1].h == 1 && in[1].w == 1;
  require((pixels || one) && (in[1].c == in[0].c || in[1].c == 1), "the second operand's shape does not fit the first's");
  return in[0];
}

void plan_join(Planner& planner, const Op& op) {
  int a = planner.value_of(op.in[0]), b = planner.value_of(op.in[1]);
  const Shape shape = planner.shape_of(op.in[0]), other = planner.shape_of(op.in[1]);
  if (shape.h == 1 && shape.w == 1) a = planner.flat(a);
  const Geometry out = bare(planner.value(a).geometry);
  b = other.h == 1 && other.w == 1 ? planner.flat(b) : planner.with_tiles(b, out);
  const bool positive = planner.value(a).nonnegative && planner.value(b).nonnegative && op.act.kind == Act::None &&
                        op.kind != Kind::Sub;
  planner.set_value(op.out, planner.add_value(shape, out, positive || clamps_at_zero(op.act)));
  planner.add_step<Joined>(op, std::vector<int>{a, b}, planner.value_of(op.out));
}

}  // namespace

extern const Operator kAdd = {"add", 2, 2, false, false, join_shape, plan_join};
extern const Operator kSub = {"sub", 2, 2, false, false, join_shape, plan_join};
extern const Operator kMul = {"mul", 2, 2, false, false, join_shape, plan_join};
extern const Operator kDiv = {"div", 2, 2, false, false, join_shape, plan_join};

}  // namespace dcil
