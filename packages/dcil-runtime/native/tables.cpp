#include "tables.h"

#include <algorithm>

namespace dcil {

namespace {

void fill_gather(const Layout& from, const Layout& to, Step& step) {
  step.table = gather_table(to, [&](int image, int y, int x) { return from.address(image, y, x); });
}

void fill_distances(const Layout& in, const Window& w, Step& step) {
  step.table.reserve(size_t(w.kh) * w.kw);
  for (int ky = 0; ky < w.kh; ky++)
    for (int kx = 0; kx < w.kw; kx++)
      step.table.push_back(int32_t((long(ky) * w.dy * in.row() + long(kx) * w.dx * in.lanes.count) * 4));
}

/// How many positions of the window at output `o` count: those in the image, or in the image and its padding, which
/// reaches `pad` beyond both ends (a window rounded up beyond that never counts).
int counted(int o, int size, int kernel, int stride, int before, int pad, bool count_pad) {
  const int begin = o * stride - before, end = std::min(begin + kernel, size + pad);
  return count_pad ? end - begin : std::min(end, size) - std::max(begin, 0);
}

void fill_scale(const Layout& in, const Layout& out, const Op& op, Step& step) {
  const Window& w = op.window;
  const bool pad = op.count_pad != 0;
  step.scale.reserve(size_t(out.vectors()) * out.lanes.count);
  for (int y = 0; y < out.geometry.height; y++)
    for (int x = 0; x < out.geometry.width; x++)
      for (int lane = 0; lane < out.lanes.count; lane++) {
        const int row = lane / out.lanes.columns % out.lanes.rows, column = lane % out.lanes.columns;
        const int oy = row * out.geometry.height + y, ox = column * out.geometry.width + x;
        const int n = counted(oy, in.shape.h, w.kh, w.sy, w.top, w.top, pad) *
                      counted(ox, in.shape.w, w.kw, w.sx, w.left, w.left, pad);
        step.scale.push_back(out.inside(lane, y, x) && n > 0 ? 1.0f / float(n) : 0.0f);
      }
}

}  // namespace

void fill_tables(const Program& p, Step& step) {
  const Layout& in = *p.values[step.in[0]].layout;
  const Layout& out = *p.values[step.out].layout;
  switch (step.work) {
    case Work::Gather: fill_gather(in, out, step); break;
    case Work::Pool:
      fill_distances(in, step.op->window, step);
      if (step.op->kind == Kind::AvgPool) fill_scale(in, out, *step.op, step);
      break;
    default: break;
  }
}

}  // namespace dcil
