// Tensors that the file holds: numbers that are the same in every image, and rows of a table chosen by whole numbers.
#include "../cost.h"
#include "../planner.h"
#include "places.h"

namespace dcil {

namespace {

/// Writes numbers of the op's table one by one.
class FromTable : public Step {
 public:
  using Step::Step;
  void add_cost(const Program& p, Cost& cost) const override {
    const Layout& to = *p.values[size_t(out)].layout;
    cost.tables += Places::bytes(to);
    cost.work += 2 * double(to.shape.size()) * p.lanes.images;
  }
  void build(const Program& p) override { to_.build(*p.values[size_t(out)].layout); }
  long bytes() const override { return to_.bytes(); }

 protected:
  Places to_;
};

class Constant final : public FromTable {
 public:
  Constant(const Op& op, int to) : FromTable("constant", &op, {}, to) {}
  void run(const Member& m) const override;
};

void Constant::run(const Member& m) const {
  const Layout& to = layout(m, out);
  const Range own = share(to.shape.c, m);
  float* const floats = m.arena.value(out);
  to_.clear(floats, own);
  const size_t pixels = to_.at.size();
  for (int c = own.begin; c < own.end; c++)
    for (int n = 0; n < to.lanes.images; n++) {
      float* plane = floats + c * to_.plane + n * to_.image;
      for (size_t p = 0; p < pixels; p++) plane[to_.at[p]] = op->table[size_t(c) * pixels + p];
    }
  if (!to.geometry.flat) exchange(m, out, own);
}

Shape constant_shape(Op& op, const std::vector<Shape>&) {
  require(op.shape.c && int64_t(op.table.size()) == op.shape.size(), "there must be a number for each place of the shape");
  return op.shape;
}

void plan_constant(Planner& planner, const Op& op) {
  bool nonnegative = true;
  for (float number : op.table) nonnegative &= number >= 0;
  const bool vector = op.shape.h == 1 && op.shape.w == 1;
  const Geometry out = vector ? flat_geometry() : planner.even_tiles(op.shape);
  planner.set_value(op.out, planner.add_value(op.shape, out, nonnegative));
  planner.add_step<Constant>(op, planner.value_of(op.out));
}

/// out[c][t] = table[in[t]][c].
class Embedding final : public FromTable {
 public:
  Embedding(const Op& op, int from, int to) : FromTable("embedding", &op, {from}, to) {}
  void run(const Member& m) const override;
};

void Embedding::run(const Member& m) const {
  const Layout& to = layout(m, out);
  const Range own = share(to.shape.c, m);
  const size_t tokens = to_.at.size();
  const float rows = float(op->table.size() / size_t(to.shape.c));
  float* const floats = m.arena.value(out);
  to_.clear(floats, own);
  for (int n = 0; n < to.lanes.images; n++)
    for (size_t t = 0; t < tokens; t++) {
      // An engine lets no others in, but tuning runs on whatever lies in memory.
      const float number = m.arena.value(in[0])[size_t(n) * tokens + t];
      const size_t row = number >= 0 && number < rows ? size_t(number) : 0;
      const float* from = op->table.data() + row * size_t(to.shape.c);
      for (int c = own.begin; c < own.end; c++) floats[c * to_.plane + n * to_.image + to_.at[t]] = from[c];
    }
  exchange(m, out, own);
}

Shape embedding_shape(Op& op, const std::vector<Shape>& in) {
  require(in[0].h == 1 && in[0].w == 1, "an embedding's input is not a vector");
  require(op.shape.c && op.shape.h == 1 && op.shape.w == in[0].c, "an embedding's output has another length than its input");
  const int64_t width = op.shape.c, numbers = int64_t(op.table.size());
  require(numbers > 0 && numbers % width == 0 && numbers / width <= kMostWhole, "a table without rows of the shape's channels");
  return op.shape;
}

void plan_embedding(Planner& planner, const Op& op) {
  planner.set_value(op.out, planner.add_value(op.shape, planner.even_tiles(op.shape), false));
  planner.add_step<Embedding>(op, planner.flat(planner.value_of(op.in[0])), planner.value_of(op.out));
}

}  // namespace

extern const Operator kConstant = {"constant", 0, 0, false, false, constant_shape, plan_constant};
extern const Operator kEmbedding = {"embedding", 1, 1, false, false, embedding_shape, plan_embedding};

}  // namespace dcil
