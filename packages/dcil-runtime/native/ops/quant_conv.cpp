#include "quant_conv.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "../cost.h"
#include "convert.h"

namespace dcil {

void Requantized::build(const Op& op, const Quant& in, const Quant& out, const Quant& rest, int byte_offset) {
  const double residual_share = rest ? double(rest.scale) / double(out.scale) : 0;
  residual_scale = float(residual_share);
  for (size_t o = 0; o < op.bias.size(); o++) {
    int64_t total = 0;
    double most = 0;
    for (int64_t i = op.start[o]; i < op.start[o + 1]; i++) {
      total += int64_t(op.weight[size_t(i)]);
      most += 255 * std::fabs(double(op.weight[size_t(i)]));
    }
    first.push_back(int32_t((byte_offset - in.zero) * total));
    scale.push_back(float(double(in.scale) * double(op.weight_scale[o]) / double(out.scale)));
    offset.push_back(float(double(op.bias[o]) / double(out.scale) + out.zero - residual_share * rest.zero));
    wild |= !(most * double(scale.back()) + std::fabs(double(offset.back())) + 256 * residual_share < 2e9);
  }
}

Activation clamped_store(const Activation& act, const Quant& quant, Store& store) {
  store = store_of(quant);
  if (act.kind != Act::Clamp) return act;
  const auto end = [&](float real) {
    const double q = std::nearbyint(double(real) / double(quant.scale)) + quant.zero;
    return uint8_t(std::min(255.0, std::max(0.0, q)));
  };
  store.low = end(act.a);
  store.high = std::max(store.low, end(act.b));
  return {};
}

QuantFinish finish_of(const Member& m, const Step& step) {
  const Op& op = *step.op;
  const Layout& to = layout(m, step.out);
  QuantFinish f{};
  f.out = m.arena.byte_planes(step.out);
  f.act = clamped_store(op.act, op.quant, f.store);
  if (step.residual >= 0) f.residual = m.arena.byte_planes(step.residual);
  if (step.twin >= 0) {
    f.twin = m.arena.byte_planes(step.twin);
    f.twin_store = store_of(op.twin_quant);
    f.twin_scale = op.twin_scale.data();
    f.twin_shift = op.twin_shift.data();
    f.act = op.act;
    f.twin_act = op.twin_act;
  }
  f.mask = to.byte_mask();
  f.mask_row = long(to.geometry.width) * to.lanes.count;
  return f;
}

void QuantConv::settle(const Program& p) {
  const Window& w = window;
  one_row = w.kh * w.kw * w.sy * w.sx == 1 && w.top + w.left == 0;
  for (int v : {in[0], out, residual, twin}) {
    if (v < 0) continue;
    const Geometry& g = p.values[size_t(v)].geometry;
    one_row &= g.top + g.left + g.bottom + g.right == 0;
  }
}

void QuantConv::add_cost(const Program& p, Cost& cost) const {
  const Layout& to = *p.values[size_t(out)].layout;
  const double kept = double(op->weight.size()), channels = double(to.shape.c);
  const double stream = 20 * (kept + channels * (p.threads + 1));  // one input in each group of four, at worst
  cost.tables += stream + 24 * channels;
  cost.passing = std::max(cost.passing, 3 * stream + 64 * 4 * kept + 64 * channels);
  cost.work += (kept / 2 + channels) * double(to.vectors()) * to.lanes.count;
}

void QuantConv::build(const Program& p) {
  const Quant none, &rest = residual < 0 ? none : p.values[size_t(residual)].quant;
  requantized_.build(*op, p.values[size_t(in[0])].quant, op->quant, rest, p.kernels.quant->byte_offset);
}

void QuantConv::unshare(const Program& p) {
  if (chosen.split != Split::Channels) return;
  chosen.split = Split::None;
  packed = pack_groups(*op, *p.values[size_t(in[0])].layout, p.kernels.quant->tiles[chosen.tile].width, 1);
}

QuantConvArgs QuantConv::arguments(const Member& m) const {
  const Layout& to = layout(m, out);
  const BytePlanes from = m.arena.byte_planes(in[0]);
  QuantConvArgs a{};
  a.in = from.data - window.top * from.row - long(window.left) * to.lanes.count;
  a.row_step = from.row * window.sy;
  a.column_step = long(to.lanes.count) * window.sx;
  a.y1 = to.geometry.height;
  a.x1 = to.geometry.width;
  a.first = requantized_.first.data();
  a.finish = finish_of(m, *this);
  a.finish.scale = requantized_.scale.data();
  a.finish.offset = requantized_.offset.data();
  a.finish.residual_scale = requantized_.residual_scale;
  a.finish.wild = requantized_.wild;
  const bool own = chosen.split == Split::Channels && m.parts > 1;
  a.groups = {packed.channel.data(), packed.start.data(), packed.stream.data(),
              own ? packed.parts[size_t(m.part)] : 0, own ? packed.parts[size_t(m.part) + 1] : packed.parts.back()};
  return a;
}

const QuantTile& QuantConv::tile(const Member& m) const {
  const QuantKernels& k = *m.program.kernels.quant;
  return (window.sx == 1 ? k.tiles : k.tiles_any)[chosen.tile];
}

void QuantConv::run(const Member& m) const {
  QuantConvArgs a = arguments(m);
  const bool everything = m.parts == 1 || chosen.split == Split::Channels;
  const Range rows = chosen.split == Split::Rows ? share(a.y1, m)
                     : everything || m.part == 0 ? Range{0, a.y1}
                                                 : Range{0, 0};
  if (rows.begin == rows.end || a.groups.begin == a.groups.end) return;
  const QuantTile& kernel = tile(m);
  a.y0 = one_row ? 0 : rows.begin;
  a.y1 = one_row ? 1 : rows.end;
  if (one_row) a.x0 = rows.begin * a.x1, a.x1 = rows.end * a.x1;
  kernel.conv(a);
  const int32_t* channels = a.groups.channel + a.groups.begin * kernel.width;
  for (int i = 0, end = (a.groups.end - a.groups.begin) * kernel.width; i < end;) {  // -1: no channel
    const int run = int(std::find(channels + i, channels + end, -1) - channels) - i;
    for (int value : {out, twin})
      if (value >= 0 && run > 0) exchange_bytes(m, value, channels + i, 0, run, rows);
    i += run + 1;
  }
}

std::string QuantConv::choice(const Program& p) const {
  static const char* const splits[] = {"", " by rows", " by channels"};
  const QuantTile& t = p.kernels.quant->tiles[chosen.tile];
  const Window& w = window;
  char text[160];
  std::snprintf(text, sizeof text, "%dx%d/%d kept %zu  int8 %dx%d, %d channels%s", w.kh, w.kw, w.sy, op->weight.size(),
                t.rows, t.columns, t.width, splits[int(chosen.split)]);
  return text;
}

long QuantConv::macs(const Program& p) const {
  const Shape& to = p.values[size_t(out)].shape;
  return long(op->weight.size()) * to.h * to.w * p.lanes.images;
}

}  // namespace dcil
