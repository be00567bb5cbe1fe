// Channels of any of several tensors, in any order: slices, shuffles and concatenations of them.
#include <algorithm>
#include <cstring>

#include "../cost.h"
#include "../execute.h"
#include "../planner.h"

namespace dcil {

namespace {

class Select final : public Step {
 public:
  Select(const Op& op, std::vector<int> in, int to) : Step("select", &op, std::move(in), to) {}
  void add_cost(const Program& p, Cost& cost) const override {
    const Value& to = p.values[size_t(out)];
    cost.tables += double(to.shape.c) * sizeof(Source);
    cost.passing = std::max(cost.passing, 8.0 * double(in.size() + 1));
    cost.work += double(to.layout->vectors()) * p.lanes.count * to.shape.c;
  }
  void build(const Program& p) override;
  void run(const Member& m) const override;
  long bytes() const override { return long(sources_.size() * sizeof(Source)); }

 private:
  struct Source {
    int value, channel;
  };
  std::vector<Source> sources_;  // of every output channel
};

void Select::build(const Program& p) {
  std::vector<int> first{0};  // every input's first channel in the numbering of all
  for (int value : in) first.push_back(first.back() + p.values[size_t(value)].shape.c);
  sources_.reserve(op->index.size());
  for (uint32_t channel : op->index) {
    const size_t i = size_t(std::upper_bound(first.begin(), first.end(), int(channel)) - first.begin()) - 1;
    sources_.push_back({in[i], int(channel) - first[i]});
  }
}

void Select::run(const Member& m) const {
  const Layout& to = layout(m, out);
  const Range own = share(to.shape.c, m);
  for (int c = own.begin; c < own.end; c++) {
    const Source& source = sources_[size_t(c)];
    if (to.geometry.flat) {
      const int channels = layout(m, source.value).shape.c;
      for (int n = 0; n < to.lanes.images; n++)
        m.arena.value(out)[long(n) * to.shape.c + c] = m.arena.value(source.value)[long(n) * channels + source.channel];
      continue;
    }
    const Planes from = m.arena.planes(source.value), into = m.arena.planes(out);
    const size_t bytes = size_t(to.geometry.width) * size_t(to.lanes.count) * 4;
    for (int y = 0; y < to.geometry.height; y++)
      std::memcpy(into.data + c * into.plane + y * into.row, from.data + source.channel * from.plane + y * from.row, bytes);
  }
  if (!to.geometry.flat) exchange(m, out, own);
}

Shape select_shape(Op& op, const std::vector<Shape>& in) {
  long channels = 0;
  for (const Shape& part : in) {
    require(part.h == in[0].h && part.w == in[0].w, "tensors to choose channels of differ in shape");
    channels += part.c;
  }
  require(channels <= (1 << 24), "a tensor is too large");
  require(!op.index.empty() && op.index.size() <= (1 << 24) && op.weight.empty(), "channels are not chosen");
  for (uint32_t channel : op.index) require(long(channel) < channels, "a chosen channel does not exist");
  return {int(op.index.size()), in[0].h, in[0].w};
}

void plan_select(Planner& planner, const Op& op) {
  const Geometry out = bare(planner.value(planner.value_of(op.in[0])).geometry);
  bool nonnegative = true;
  std::vector<int> in;
  for (int tensor : op.in) {
    in.push_back(planner.with_tiles(planner.value_of(tensor), out));
    nonnegative &= planner.value(in.back()).nonnegative;
  }
  planner.set_value(op.out, planner.add_value(planner.shape_of(op.out), out, nonnegative));
  planner.add_step<Select>(op, in, planner.value_of(op.out));
}

}  // namespace

extern const Operator kSelect = {"select", 1, 1 << 16, false, false, select_shape, plan_select};

}  // namespace dcil
