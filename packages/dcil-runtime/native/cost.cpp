#include "cost.h"

#include <algorithm>

namespace dcil {

namespace {

/// What a plane takes to fill, per channel: its halo by moves, or as part of a gather's table.
double vectors_written(const Layout& l) { return double(l.vectors()) + double(l.halo_vectors()); }

/// Bytes of a layout's mask and halo moves; these are gathered by row first.
void add_layout(const Layout& l, Cost& cost) {
  if (l.geometry.flat) return;
  const double moves = double(l.halo_vectors()) * sizeof(Move);
  if (l.has_mask()) cost.tables += double(l.vectors()) * l.lanes.count * 4;
  cost.tables += moves;
  cost.passing = std::max(cost.passing, 3 * moves);
}

}  // namespace

double table_entries(const Layout& l) {
  return double(l.lanes.count) * (l.gathers_halo() ? vectors_written(l) : double(l.vectors()));
}

Cost cost_of(const Program& p) {
  Cost cost;
  for (const Value& v : p.values) {
    cost.tables += sizeof(Value) + sizeof(Layout);
    add_layout(*v.layout, cost);
    cost.work += double(v.layout->halo_vectors()) * p.lanes.count * v.shape.c;  // every value is written once
  }
  for (int i = 0; i < p.graph.inputs(); i++) {
    const Value& input = p.values[size_t(i)];
    const double entries = input.geometry.flat ? p.lanes.images : table_entries(*input.layout);
    cost.tables += entries * 4;
    cost.work += entries * input.shape.c;
  }
  for (int v : p.outputs) cost.work += double(p.values[size_t(v)].shape.size()) * p.lanes.images;
  for (const auto& step : p.steps) {
    cost.tables += sizeof(Step) + 400;  // and what its kind adds to it
    step->add_cost(p, cost);
  }
  const double arena = double(p.arena_floats()) * 4 + (2 << 20), scratch = double(p.scratch_floats()) * 4;
  cost.buffers = p.threads * (arena + scratch);
  cost.passing += p.threads * (arena + scratch);  // tuning measures in buffers of its own
  return cost;
}

}  // namespace dcil
