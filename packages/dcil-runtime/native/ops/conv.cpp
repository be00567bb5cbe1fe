#include "conv.h"

#include <algorithm>
#include <cstdio>
#include <limits>

#include "../cost.h"
#include "../planner.h"
#include "gather.h"

namespace dcil {

void Conv::settle(const Program& p) {
  const Window& w = window;
  one_row = w.kh * w.kw * w.sy * w.sx == 1 && w.top + w.left == 0;
  for (int v : {in[0], out, residual, twin}) {
    if (v < 0) continue;
    const Geometry& g = p.values[size_t(v)].geometry;
    one_row &= g.top + g.left + g.bottom + g.right == 0;
  }
}

Extent Conv::extent(const Program& p) const {
  const Geometry& g = p.values[size_t(out)].geometry;
  return one_row ? Extent{1, g.height * g.width} : Extent{g.height, g.width};
}

long Conv::scratch_floats(const Program& p) const {
  return long(p.values[size_t(out)].shape.c) * kMaxTile * p.lanes.count;
}

namespace {

/// At most so many taps that four channels share: one for each position of their windows.
double quad_taps(const Op& op, const Layout& in, int threads) {
  const double window = double(in.shape.c) / op.groups * op.window.kh * op.window.kw;
  const double fours = double(op.bias.size()) / 4 + threads + 1;
  return std::min(double(op.weight.size()), fours * window * (op.groups > 1 ? 4 : 1));
}

}  // namespace

void Conv::add_cost(const Program& p, Cost& cost) const {
  const Layout &from = *p.values[size_t(in[0])].layout, &to = *p.values[size_t(out)].layout;
  const double kept = double(op->weight.size()), channels = double(to.shape.c);
  const double taps = std::max(kept * sizeof(Tap), quad_taps(*op, from, p.threads) * sizeof(QuadTap));
  cost.tables += taps + 8 * channels;
  // Weights packed in one way lie beside those packed in another; vectors that grow take twice what they hold.
  const double sorted = 64 * std::min(kept, 4.0 * from.shape.c * window.kh * window.kw);
  cost.passing = std::max(cost.passing, 3 * taps + sorted + channels * 8 * 64);
  cost.work += (kept + channels) * double(to.vectors()) * to.lanes.count;
}

/// Where nobody shares a layer its rows go back into the order that suits one thread.
void Conv::unshare(const Program& p) {
  if (chosen.split != Split::Channels) return;
  chosen.split = Split::None;
  packed = pack(*op, *p.values[size_t(in[0])].layout, chosen, 1);
}

ConvArgs Conv::arguments(const Member& m) const {
  const Layout& to = layout(m, out);
  const Planes from = m.arena.planes(in[0]);
  ConvArgs a{};
  a.in = from.data - window.top * from.row - long(window.left) * to.lanes.count;
  a.row_step = from.row * window.sy;
  a.column_step = long(to.lanes.count) * window.sx;
  a.y1 = to.geometry.height;
  a.x1 = to.geometry.width;
  a.scratch = m.scratch;
  Finish& f = a.finish;
  f.out = m.arena.planes(out);
  if (residual >= 0) f.residual = m.arena.planes(residual);
  if (twin >= 0) f.twin = m.arena.planes(twin);
  f.bias = op->bias.data();
  f.twin_scale = op->twin_scale.data();
  f.twin_shift = op->twin_shift.data();
  f.mask = to.mask();
  f.mask_row = long(to.geometry.width) * to.lanes.count;
  f.act = op->act;
  f.twin_act = op->twin_act;
  constexpr float infinity = std::numeric_limits<float>::infinity();
  const bool bounded = op->act.kind == Act::Clamp && op->act.b == infinity;
  f.simple = !f.mask && !f.twin.data && (bounded || op->act.kind == Act::None);
  f.low = bounded ? op->act.a : -infinity;
  return a;
}

Range Conv::split_rows(const Member& m, int height) const {
  if (chosen.split == Split::Rows) return share(height, m);
  return chosen.split == Split::None && m.part > 0 ? Range{0, 0} : Range{0, height};
}

/// The tile functions for a layer; tile_any when no column step was compiled in.
const Tile& Conv::tile(const Member& m) const {
  const KernelSet& k = m.program.kernels;
  const int stride = window.sx;
  return stride == 1 ? k.tiles[chosen.tile] : stride == 2 ? k.tiles_stride2[chosen.tile] : *k.tile_any;
}

/// The entries of a stream this member computes: its part where channels are shared out, otherwise all.
template <class Entry>
Range Conv::entries(const Member& m, const Stream<Entry>& stream) const {
  if (chosen.split == Split::Channels && m.parts > 1) return {stream.parts[m.part], stream.parts[m.part + 1]};
  return {stream.parts.front(), stream.parts.back()};
}

void Conv::run_blocks(const Member& m, ConvArgs& a) const {
  Rows rows[64];
  a.block_count = int(packed.blocks.size());
  for (int b = 0; b < a.block_count; b++) {
    const auto& t = packed.blocks[b];
    const Range own = entries(m, t);
    rows[b] = {t.channel.data(), t.start.data(), t.taps.data(), own.begin, own.end};
  }
  a.blocks = rows;
  (chosen.method == Method::Tiles ? tile(m).conv : tile(m).conv_by_channel)(a);
}

/// The halos of the channels (and rows) this member has just computed.
template <class Entry>
void Conv::exchange_own(const Member& m, const Stream<Entry>& stream, int width, Range rows) const {
  const Range own = entries(m, stream);
  for (size_t part = 0; part + 1 < stream.parts.size(); part++) {
    if (stream.parts[part] < own.begin || stream.parts[part + 1] > own.end) continue;
    const int begin = stream.parts[part] * width;
    int end = stream.parts[part + 1] * width;
    while (end > begin && stream.channel[end - 1] < 0) end--;  // the last four channels of a part may be fewer
    for (int value : {out, twin})
      if (value >= 0) exchange(m, value, stream.channel.data() + begin, 0, end - begin, rows);
  }
}

void Conv::run(const Member& m) const {
  ConvArgs a = arguments(m);
  const Range rows = split_rows(m, a.y1);
  if (rows.begin == rows.end) return;
  a.y0 = rows.begin;
  a.y1 = rows.end;
  if (one_row) {
    a.x0 = rows.begin * a.x1;
    a.x1 = rows.end * a.x1;
    a.y0 = 0;
    a.y1 = 1;
  }
  if (chosen.method == Method::Quads) {
    const auto& q = packed.quads;
    const Range own = entries(m, q);
    a.quads = {q.channel.data(), q.start.data(), q.taps.data(), own.begin, own.end};
    tile(m).conv_quads(a);
    exchange_own(m, q, 4, rows);
  } else {
    run_blocks(m, a);
    exchange_own(m, packed.blocks.back(), 1, rows);
  }
}

/// Window, kept weights and kernel.
std::string Conv::choice(const Program& p) const {
  static const char* const methods[] = {"tiles", "channels", "quads"};
  static const char* const splits[] = {"", " by rows", " by channels"};
  const Tile& t = p.kernels.tiles[chosen.tile];
  const Window& w = op->window;
  char text[160];
  std::snprintf(text, sizeof text, "%dx%d/%d kept %zu  %s %dx%d blocks %d%s", w.kh, w.kw, w.sy, op->weight.size(),
                methods[int(chosen.method)], t.rows, t.columns, chosen.blocks, splits[int(chosen.split)]);
  return text;
}

long Conv::macs(const Program& p) const {
  const Shape& to = p.values[size_t(out)].shape;
  return long(op->weight.size()) * to.h * to.w * p.lanes.images;
}

namespace {

Shape conv_shape(Op& op, const std::vector<Shape>& in) {
  const int outputs = int(op.bias.size());
  require(op.groups >= 1 && in[0].c % op.groups == 0 && outputs % op.groups == 0, "channels do not divide by groups");
  const Shape out = slide(in[0], outputs, op.window);
  check_weights(op, outputs, long(in[0].c / op.groups) * op.window.kh * op.window.kw);
  return out;
}

void plan_conv(Planner& planner, const Op& op) {
  planner.set_value(op.in[0], planner.spatial(planner.value_of(op.in[0])));
  Geometry out;
  const Geometry need = planner.window_input(op, out);
  const int from = planner.value_of(op.in[0]);
  Window window = op.window;
  int in;
  if (skips_pixels(window) && planner.copies(from, need)) {  // copies only what the window reads
    const Shape read{planner.value(from).shape.c, planner.shape_of(op.out).h, planner.shape_of(op.out).w};
    in = planner.add_value(read, out, planner.value(from).nonnegative);
    planner.add_step<Gather>(from, in, window.sy, window.sx);
    window.sy = window.sx = 1;
  } else {
    in = planner.with_window(from, op, need);
  }
  const int residual = op.residual < 0 ? -1 : planner.with_tiles(planner.value_of(op.residual), out);
  const Shape shape = planner.shape_of(op.out);
  planner.set_value(op.out, planner.add_value(shape, out, clamps_at_zero(op.act)));
  if (op.twin >= 0) planner.set_value(op.twin, planner.add_value(shape, out, clamps_at_zero(op.twin_act)));
  Conv& step = planner.add_step<Conv>(op, in, planner.value_of(op.out), window);
  step.residual = residual;
  step.twin = op.twin < 0 ? -1 : planner.value_of(op.twin);
}

}  // namespace

extern const Operator kConv = {"conv", 1, 1, true, true, conv_shape, plan_conv};

}  // namespace dcil
