// Numbers of any of several tensors, in any order: reshapes, permutations, slices and concatenations that no cheaper
// operator does. An index counts through all inputs; kNothing gives zero.
#include <algorithm>

#include "../cost.h"
#include "../planner.h"
#include "places.h"

namespace dcil {

namespace {

constexpr uint32_t kNothing = 0xffffffff;

class Take final : public Step {
 public:
  Take(const Op& op, std::vector<int> in, int to) : Step("take", &op, std::move(in), to) {}
  void add_cost(const Program& p, Cost& cost) const override;
  void build(const Program& p) override;
  void run(const Member& m) const override;
  long bytes() const override { return long(from_.size()) * 8 + to_.bytes(); }

 private:
  Places to_;
  std::vector<int64_t> from_;  // of every number of the output: its source, from the arena's beginning; -1: none
  long image_ = 0;             // from one image to the next, in every input
};

void Take::add_cost(const Program& p, Cost& cost) const {
  const Layout& to = *p.values[size_t(out)].layout;
  cost.tables += 8.0 * double(to.shape.size()) + Places::bytes(to);
  double passing = 0;
  for (int v : in) passing += Places::bytes(*p.values[size_t(v)].layout) + sizeof(Places) + 16;
  cost.passing = std::max(cost.passing, 2 * passing);
  cost.work += 4 * double(to.shape.size()) * p.lanes.images;
}

void Take::build(const Program& p) {
  to_.build(*p.values[size_t(out)].layout);
  std::vector<Places> places(in.size());
  std::vector<int64_t> first{0};  // every input's first number in the numbering of all
  for (size_t i = 0; i < in.size(); i++) {
    const Layout& l = *p.values[size_t(in[i])].layout;
    places[i].build(l);
    image_ = places[i].image;
    first.push_back(first.back() + l.shape.size());
  }
  from_.reserve(op->index.size());
  for (uint32_t index : op->index) {
    if (index == kNothing) {
      from_.push_back(-1);
      continue;
    }
    const size_t i = size_t(std::upper_bound(first.begin(), first.end(), int64_t(index)) - first.begin()) - 1;
    const int64_t rest = int64_t(index) - first[i], pixels = int64_t(places[i].at.size());
    const long begin = p.slot_offset(p.values[size_t(in[i])].slot);
    from_.push_back(begin + rest / pixels * places[i].plane + places[i].at[size_t(rest % pixels)]);
  }
}

void Take::run(const Member& m) const {
  const Layout& to = layout(m, out);
  const Range own = share(to.shape.c, m);
  float* const floats = m.arena.value(out);
  const float* const begin = floats - m.program.slot_offset(m.program.values[size_t(out)].slot);
  to_.clear(floats, own);
  const size_t pixels = to_.at.size();
  for (int c = own.begin; c < own.end; c++) {
    const int64_t* from = from_.data() + size_t(c) * pixels;
    for (int n = 0; n < to.lanes.images; n++) {
      float* plane = floats + c * to_.plane + n * to_.image;
      for (size_t p = 0; p < pixels; p++) plane[to_.at[p]] = from[p] < 0 ? 0 : begin[from[p] + n * image_];
    }
  }
  if (!to.geometry.flat) exchange(m, out, own);
}

Shape take_shape(Op& op, const std::vector<Shape>& in) {
  int64_t numbers = 0;
  for (const Shape& part : in) numbers += part.size();
  require(numbers < int64_t(kNothing), "a tensor is too large");
  require(op.shape.c && int64_t(op.index.size()) == op.shape.size() && op.weight.empty(),
          "there must be an index for each number of the shape");
  for (uint32_t index : op.index) require(int64_t(index) < numbers || index == kNothing, "a chosen number does not exist");
  return op.shape;
}

void plan_take(Planner& planner, const Op& op) {
  std::vector<int> in;
  for (int tensor : op.in) {
    const int value = planner.value_of(tensor);
    in.push_back(op.in.size() == 1 ? value : planner.spatial(value));  // images lie equally far apart in all
  }
  const bool vector = op.shape.h == 1 && op.shape.w == 1;
  const Geometry out = vector ? flat_geometry() : planner.even_tiles(op.shape);
  planner.set_value(op.out, planner.add_value(op.shape, out, false));
  planner.add_step<Take>(op, in, planner.value_of(op.out));
}

}  // namespace

extern const Operator kTake = {"take", 1, 1 << 16, false, false, take_shape, plan_take};

}  // namespace dcil
