#include "quant_pointwise.h"

#include "../cost.h"
#include "convert.h"
#include "pool_window.h"
#include "quant_conv.h"

namespace dcil {

namespace {

double vectors_of(const Program& p, int value) {
  const Value& v = p.values[size_t(value)];
  return double(v.layout->vectors()) * v.layout->lanes.count * v.shape.c;
}

}  // namespace

void QuantMap::add_cost(const Program& p, Cost& cost) const {
  cost.tables += 8.0 * p.values[size_t(in[0])].shape.c;
  cost.work += vectors_of(p, in[0]);
}

void QuantMap::build(const Program& p) {
  const Quant &from = p.values[size_t(in[0])].quant, &to = op->quant;
  const double unit = double(from.scale) / double(to.scale);
  const double other = residual < 0 ? 0 : double(p.values[size_t(residual)].quant.scale) / double(to.scale);
  residual_scale_ = float(other);
  for (int c = 0; c < p.values[size_t(in[0])].shape.c; c++) {
    const bool plain = copies() || op->scale.empty();
    const double scale = plain ? unit : unit * double(op->scale[size_t(c)]);
    const double shift = plain ? 0 : double(op->shift[size_t(c)]) / double(to.scale);
    scale_.push_back(float(scale));
    offset_.push_back(float(shift + to.zero - scale * from.zero -
                            (residual < 0 ? 0 : other * p.values[size_t(residual)].quant.zero)));
  }
}

void QuantMap::run(const Member& m) const {
  const Layout& to = layout(m, out);
  const Range own = share(layout(m, in[0]).shape.c, m);
  QuantMapArgs a{};
  a.a = m.arena.byte_planes(in[0]);
  a.finish = finish_of(m, *this);
  a.finish.out.data += channel_ * a.finish.out.plane;
  if (copies()) a.finish.act = {}, a.finish.store = store_of(op->quant);
  a.finish.scale = scale_.data();
  a.finish.offset = offset_.data();
  a.finish.residual_scale = residual_scale_;
  a.finish.wild = true;
  a.c0 = own.begin;
  a.c1 = own.end;
  a.y1 = to.geometry.height;
  a.width = to.geometry.width;
  m.program.kernels.quant->map(a);
  exchange_bytes(m, out, {own.begin + channel_, own.end + channel_});
}

void QuantPool::add_cost(const Program& p, Cost& cost) const {
  const double taps = double(op->window.kh) * op->window.kw;
  cost.tables += taps * 4;
  cost.work += taps * vectors_of(p, out);
}

void QuantPool::build(const Program& p) {
  distances_ = taps_of(op->window, *p.values[size_t(in[0])].layout, 1);
}

void QuantPool::run(const Member& m) const {
  const Layout& to = layout(m, out);
  const Range own = share(to.shape.c, m);
  QuantPoolArgs a{};
  a.in = m.arena.byte_planes(in[0]);
  a.out = m.arena.byte_planes(out);
  slide_window(a, op->window, to, own, distances_);
  a.mask = to.byte_mask();
  a.zero = uint8_t(op->quant.zero);
  m.program.kernels.quant->pool(a);
  exchange_bytes(m, out, own);
}

void QuantMean::add_cost(const Program& p, Cost& cost) const { cost.work += vectors_of(p, in[0]); }

void QuantMean::run(const Member& m) const {
  const Value& from = m.program.values[size_t(in[0])];
  const Range own = share(from.shape.c, m);
  const double pixels = double(from.shape.h) * from.shape.w;
  // What lies beyond the image holds the zero point too.
  const int64_t counted = int64_t(from.layout->vectors()) * (from.layout->lanes.count / from.layout->lanes.images);
  m.program.kernels.quant->mean({m.arena.byte_planes(in[0]), own.begin, own.end, from.geometry.height,
                                 from.geometry.width, from.layout->lanes.images, from.shape.c,
                                 float(double(from.quant.scale) / pixels), counted * from.quant.zero,
                                 m.arena.value(out)});
}

}  // namespace dcil
