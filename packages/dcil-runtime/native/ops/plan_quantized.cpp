// Which operators compute with u8, and the steps they become.
#include <algorithm>

#include "../planner.h"
#include "convert.h"
#include "quant_conv.h"
#include "quant_linear.h"
#include "quant_pointwise.h"

namespace dcil {

namespace {

void plan_conv(Planner& planner, const Op& op) {
  const int from = planner.spatial(planner.bytes_of(op.in[0]));
  planner.set_bytes(op.in[0], from);
  Geometry tiles;
  const Geometry need = planner.window_input(op, from, tiles);
  Window window = op.window;
  int in;
  if (skips_pixels(window) && planner.copies(from, need)) {  // copies only what the window reads
    const Shape read{planner.value(from).shape.c, planner.shape_of(op.out).h, planner.shape_of(op.out).w};
    in = planner.add_bytes(read, tiles, planner.value(from).quant);
    planner.add_step<GatherBytes>(from, in, window.sy, window.sx);
    window.sy = window.sx = 1;
  } else {
    in = planner.with_window(from, op, need);
  }
  const int residual = op.residual < 0 ? -1 : planner.with_tiles(planner.bytes_of(op.residual), tiles);
  const Shape shape = planner.shape_of(op.out);
  planner.set_bytes(op.out, planner.add_bytes(shape, tiles, op.quant));
  if (op.twin >= 0) planner.set_bytes(op.twin, planner.add_bytes(shape, tiles, op.twin_quant));
  QuantConv& step = planner.add_step<QuantConv>(op, in, planner.bytes_of(op.out), window);
  step.residual = residual;
  step.twin = op.twin < 0 ? -1 : planner.bytes_of(op.twin);
}

void plan_linear(Planner& planner, const Op& op) {
  int in = planner.bytes_of(op.in[0]);
  if (!planner.value(in).geometry.flat) {
    const int floats = planner.flat(planner.value_of(op.in[0]));
    in = planner.add_bytes(planner.value(floats).shape, flat_geometry(), planner.quant_of(op.in[0]));
    planner.add_step<Quantize>(floats, in);  // rounds back to the same bytes
  }
  const int residual = op.residual < 0 ? -1 : planner.flat(planner.value_of(op.residual));
  planner.set_value(op.out, planner.add_value(planner.shape_of(op.out), flat_geometry(), clamps_at_zero(op.act)));
  planner.add_step<QuantLinear>(op, in, planner.value_of(op.out)).residual = residual;
}

void plan_map(Planner& planner, const Op& op) {
  const int in = planner.bytes_of(op.in[0]);
  const Geometry tiles = bare(planner.value(in).geometry);
  const int residual = op.in.size() < 2 ? -1 : planner.with_tiles(planner.bytes_of(op.in[1]), tiles);
  planner.set_bytes(op.out, planner.add_bytes(planner.shape_of(op.out), tiles, op.quant));
  planner.add_step<QuantMap>("map int8", op, in, planner.bytes_of(op.out)).residual = residual;
}

void plan_pool(Planner& planner, const Op& op) {
  const int from = planner.bytes_of(op.in[0]);
  Geometry tiles;
  const Geometry need = planner.window_input(op, from, tiles);
  const int in = planner.with_window(from, op, need);
  planner.set_bytes(op.out, planner.add_bytes(planner.shape_of(op.out), tiles, op.quant));
  planner.add_step<QuantPool>(op, in, planner.bytes_of(op.out));
}

void plan_concat(Planner& planner, const Op& op) {
  const Geometry tiles = bare(planner.value(planner.bytes_of(op.in[0])).geometry);
  std::vector<int> in;
  for (int tensor : op.in) in.push_back(planner.with_tiles(planner.bytes_of(tensor), tiles));
  planner.set_bytes(op.out, planner.add_bytes(planner.shape_of(op.out), tiles, op.quant));
  int channel = 0;
  for (int part : in) {
    planner.add_step<QuantMap>("copy int8", op, part, planner.bytes_of(op.out), channel);
    channel += planner.value(part).shape.c;
  }
}

void plan_mean(Planner& planner, const Op& op) {
  planner.set_value(op.out, planner.add_value(planner.shape_of(op.out), flat_geometry(), planner.quant_of(op.in[0]).zero == 0));
  planner.add_step<QuantMean>(op, planner.bytes_of(op.in[0]), planner.value_of(op.out));
}

/// Is there an input, and are all of them u8 of pixels?
bool spatial_inputs(const Planner& planner, const Op& op) {
  return !op.in.empty() && std::all_of(op.in.begin(), op.in.end(), [&](int tensor) {
    return planner.bytes_of(tensor) >= 0 && !planner.value(planner.bytes_of(tensor)).geometry.flat;
  });
}

/// Do sums of 32 bits, each of a quarter of the pixels where there are four lanes, hold them?
bool sums_fit(const Shape& shape) { return long(shape.h) * shape.w <= 1 << 24; }

}  // namespace

bool plan_quantized(Planner& planner, const Op& op) {
  if (!op.weight_scale.empty()) {
    op.kind == Kind::Conv ? plan_conv(planner, op) : plan_linear(planner, op);
    return true;
  }
  if (!spatial_inputs(planner, op)) return false;
  const bool same = op.quant && planner.quant_of(op.in[0]) == op.quant;
  if (op.kind == Kind::Map && op.quant) return plan_map(planner, op), true;
  if (op.kind == Kind::MaxPool && same) return plan_pool(planner, op), true;
  if (op.kind == Kind::Concat && op.quant) return plan_concat(planner, op), true;
  if (op.kind == Kind::Mean && sums_fit(planner.shape_of(op.in[0]))) return plan_mean(planner, op), true;
  return false;
}

}  // namespace dcil
