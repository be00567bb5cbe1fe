// What the tuner chose and what it costs, as JSON.
#include <algorithm>

#include "info.h"
#include "json.h"
#include "tune.h"

namespace dcil {

namespace {

double microseconds(const Member& m, const Step& step) {
  double least = 1e30;
  for (int i = 0; i < 5; i++) {
    const int times = i == 0 ? 1 : std::max(1, std::min(50, int(200 / least)));  // reading the clock costs a bit
    const double begin = worked();
    for (int k = 0; k < times; k++) step.run(m);
    least = std::min(least, (worked() - begin) * 1e6 / times);
  }
  return least;
}

}  // namespace

std::string steps_json(const Program& program) {
  Arena arena(program);
  Aligned<float> scratch(size_t(program.scratch_floats()));
  const Member m{program, arena, scratch.data(), 0, 1};
  std::string all;
  for (const auto& step : program.steps) {
    const Value& out = program.values[size_t(step->out)];
    const Shape in = step->in.empty() ? Shape() : program.values[size_t(step->in[0])].shape;
    const Geometry& g = out.geometry;
    all += std::string(all.empty() ? "" : ",") + "{\"work\":" + quoted(step->name) +
           ",\"input\":" + shape_json(in) + ",\"output\":" + shape_json(out.shape) +
           ",\"tile\":[" + std::to_string(g.height) + "," + std::to_string(g.width) +
           "],\"kernel\":" + quoted(step->choice(program)) + ",\"macs\":" + std::to_string(step->macs(program)) +
           ",\"nanoseconds\":" + std::to_string(int64_t(1000 * microseconds(m, *step))) + "}";
  }
  return "[" + all + "]";
}

}  // namespace dcil
