// A table of what the tuner chose and what it costs, for people.
#include <algorithm>
#include <cstdio>

#include "tune.h"

namespace dcil {

namespace {

const char* name(Work work) {
  static const char* const names[] = {"gather", "conv", "pool", "map", "copy", "mean", "flatten", "linear"};
  return names[int(work)];
}

double microseconds(const Member& m, const Step& step) {
  double least = 1e30;
  for (int i = 0; i < 5; i++) {
    const int times = i == 0 ? 1 : std::max(1, std::min(50, int(200 / least)));  // reading the clock costs a bit
    const double begin = worked();
    for (int k = 0; k < times; k++) run_step(m, step);
    least = std::min(least, (worked() - begin) * 1e6 / times);
  }
  return least;
}

std::string choice_text(const Program& p, const Step& s, double us) {
  static const char* const methods[] = {"tiles", "channels", "quads"};
  static const char* const splits[] = {"", " by rows", " by channels"};
  const Tile& t = p.kernels.tiles[s.choice.tile];
  const Window& w = s.op->window;
  const Shape& out = p.values[s.out].shape;
  const double flops = 2.0 * double(s.op->weight.size()) * out.h * out.w * p.lanes.images;
  char text[160];
  std::snprintf(text, sizeof text, "  %dx%d/%d kept %zu  %s %dx%d blocks %d%s  %.1f GFLOP/s", w.kh, w.kw, w.sy,
                s.op->weight.size(), methods[int(s.choice.method)], t.rows, t.columns, s.choice.blocks,
                splits[int(s.choice.split)], flops / us * 1e-3);
  return text;
}

}  // namespace

std::string describe(const Program& program) {
  Arena arena(program);
  Aligned<float> scratch(size_t(program.scratch_floats()));
  const Member m{program, arena, scratch.data(), 0, 1};
  std::string all;
  for (const Step& s : program.steps) {
    const Shape &in = program.values[s.in[0]].shape, &out = program.values[s.out].shape;
    const Geometry& g = program.values[s.out].geometry;
    const double us = microseconds(m, s);
    char text[160];
    std::snprintf(text, sizeof text, "%-8s %4d x %3d x %3d -> %4d x %3d x %3d (%d x %d)  %8.1f us", name(s.work), in.c,
                  in.h, in.w, out.c, out.h, out.w, g.height, g.width, us);
    all += text + (s.work == Work::Conv ? choice_text(program, s, us) : std::string()) + "\n";
  }
  return all;
}

}  // namespace dcil
