// Concatenation along the channels: a copy of each part.
#include "map.h"

#include "../planner.h"

namespace dcil {

namespace {

Shape concat_shape(Op&, const std::vector<Shape>& in) {
  long channels = 0;
  for (const Shape& part : in) {
    require(part.h == in[0].h && part.w == in[0].w, "concatenated tensors differ in shape");
    channels += part.c;
  }
  require(channels <= (1 << 24), "a tensor is too large");
  return {int(channels), in[0].h, in[0].w};
}

void plan_concat(Planner& planner, const Op& op) {
  const Geometry out = bare(planner.value(planner.value_of(op.in[0])).geometry);
  bool nonnegative = true;
  std::vector<int> in;
  for (int tensor : op.in) {
    in.push_back(planner.with_tiles(planner.value_of(tensor), out));
    nonnegative &= planner.value(in.back()).nonnegative;
  }
  planner.set_value(op.out, planner.add_value(planner.shape_of(op.out), out, nonnegative));
  int channel = 0;
  for (int part : in) {
    planner.add_step<Map>("copy", op, std::vector<int>{part}, planner.value_of(op.out), true, channel);
    channel += planner.value(part).shape.c;
  }
}

}  // namespace

extern const Operator kConcat = {"concat", 1, 1 << 16, false, false, concat_shape, plan_concat};

}  // namespace dcil
