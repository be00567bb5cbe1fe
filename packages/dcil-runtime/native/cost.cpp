#include "cost.h"

#include <algorithm>

namespace dcil {

namespace {

/// What a plane takes to fill, per channel: its halo by moves, or as part of a gather's table.
double vectors_written(const Layout& l) { return double(l.vectors()) + double(l.halo_vectors()); }

double table_entries(const Layout& l) {
  return double(l.lanes.count) * (l.gathers_halo() ? vectors_written(l) : double(l.vectors()));
}

/// Bytes of a layout's mask and halo moves; these are gathered by row first.
void add_layout(const Layout& l, Cost& cost) {
  if (l.geometry.flat) return;
  const double moves = double(l.halo_vectors()) * sizeof(Move);
  if (l.has_mask()) cost.tables += double(l.vectors()) * l.lanes.count * 4;
  cost.tables += moves;
  cost.passing = std::max(cost.passing, 3 * moves);
}

/// At most so many taps that four channels share: one for each position of their windows.
double quad_taps(const Op& op, const Layout& in, int threads) {
  const double window = double(in.shape.c) / op.groups * op.window.kh * op.window.kw;
  const double fours = double(op.bias.size()) / 4 + threads + 1;
  return std::min(double(op.weight.size()), fours * window * (op.groups > 1 ? 4 : 1));
}

void add_conv(const Program& p, const Step& s, Cost& cost) {
  const Layout &in = *p.values[s.in[0]].layout, &out = *p.values[s.out].layout;
  const double kept = double(s.op->weight.size()), channels = double(out.shape.c);
  const double taps = std::max(kept * sizeof(Tap), quad_taps(*s.op, in, p.threads) * sizeof(QuadTap));
  cost.tables += taps + 8 * channels;
  // Weights packed in one way lie beside those packed in another; vectors that grow take twice what they hold.
  const double sorted = 64 * std::min(kept, 4.0 * in.shape.c * s.op->window.kh * s.op->window.kw);
  cost.passing = std::max(cost.passing, 3 * taps + sorted + channels * 8 * 64);
  cost.work += (kept + channels) * double(out.vectors()) * out.lanes.count;
}

void add_linear(const Program& p, const Step& s, Cost& cost) {
  const double inputs = p.values[s.in[0]].shape.c, outputs = p.values[s.out].shape.c;
  const double dense = inputs * outputs * 4, kept = double(s.op->weight.size()) * 4 + outputs * 4;
  cost.tables += std::max(dense, kept);
  cost.passing = std::max(cost.passing, dense + 2 * kept);
  cost.work += inputs * outputs * p.lanes.images;
}

void add_step(const Program& p, const Step& s, Cost& cost) {
  const Value &in = p.values[s.in[0]], &out = p.values[s.out];
  const double lanes = p.lanes.count, plane = double(out.layout->vectors()) * lanes;
  cost.tables += sizeof(Step);
  switch (s.work) {
    case Work::Conv: return add_conv(p, s, cost);
    case Work::Linear: return add_linear(p, s, cost);
    case Work::Gather:
      cost.tables += table_entries(*out.layout) * 4;
      cost.work += table_entries(*out.layout) * out.shape.c;
      return;
    case Work::Pool: {
      const double taps = double(s.op->window.kh) * s.op->window.kw;
      cost.tables += taps * 4 + (s.op->kind == Kind::AvgPool ? plane * 4 : 0);
      cost.work += taps * plane * out.shape.c;
      return;
    }
    case Work::Map:
    case Work::Copy: cost.work += plane * in.shape.c; return;
    case Work::Mean: cost.work += double(in.layout->vectors()) * lanes * in.shape.c; return;
    case Work::Flatten: cost.work += double(in.shape.size()) * p.lanes.images; return;
  }
}

}  // namespace

Cost cost_of(const Program& p) {
  Cost cost;
  for (const Value& v : p.values) {
    cost.tables += sizeof(Value) + sizeof(Layout);
    add_layout(*v.layout, cost);
    cost.work += double(v.layout->halo_vectors()) * p.lanes.count * v.shape.c;  // every value is written once
  }
  const Value& input = p.values[0];
  cost.tables += table_entries(*input.layout) * 4;
  cost.work += table_entries(*input.layout) * input.shape.c + double(p.values[p.output].shape.size()) * p.lanes.images;
  for (const Step& s : p.steps) add_step(p, s, cost);
  const double arena = double(p.arena_floats()) * 4 + (2 << 20), scratch = double(p.scratch_floats()) * 4;
  cost.buffers = p.threads * (arena + scratch);
  cost.passing += p.threads * (arena + scratch);  // tuning measures in buffers of its own
  return cost;
}

}  // namespace dcil
