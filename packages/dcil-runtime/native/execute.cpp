#include "execute.h"

#include <algorithm>
#include <limits>

namespace dcil {

namespace {

const Layout& layout(const Member& m, int value) { return *m.program.values[value].layout; }

/// Fills the halos of some channels (null: first, first + 1, ...) from rows [y0, y1) of their inner part.
void exchange(const Member& m, int value, const int32_t* channels, int first, int count, Range rows) {
  const Layout& l = layout(m, value);
  if (l.moves.empty()) return;
  const Move* moves = l.moves.data();
  m.program.kernels.exchange({m.arena.planes(value), channels, first, count, moves + l.moves_of_row[rows.begin],
                              moves + l.moves_of_row[rows.end], l.orders.data()});
}

void exchange(const Member& m, int value, Range channels) {
  const int height = m.program.values[value].geometry.height;
  exchange(m, value, nullptr, channels.begin, channels.end - channels.begin, {0, height});
}

ConvArgs conv_args(const Member& m, const Step& s) {
  const Op& op = *s.op;
  const Layout& out = layout(m, s.out);
  const Planes in = m.arena.planes(s.in[0]);
  ConvArgs a{};
  a.in = in.data - op.window.top * in.row - long(op.window.left) * out.lanes.count;
  a.row_step = in.row * op.window.sy;
  a.column_step = long(out.lanes.count) * op.window.sx;
  a.y1 = out.geometry.height;
  a.x1 = out.geometry.width;
  a.scratch = m.scratch;
  Finish& f = a.finish;
  f.out = m.arena.planes(s.out);
  if (s.residual >= 0) f.residual = m.arena.planes(s.residual);
  if (s.twin >= 0) f.twin = m.arena.planes(s.twin);
  f.bias = op.bias.data();
  f.twin_scale = op.twin_scale.data();
  f.twin_shift = op.twin_shift.data();
  f.mask = out.mask();
  f.mask_row = long(out.geometry.width) * out.lanes.count;
  f.act = op.act;
  f.twin_act = op.twin_act;
  constexpr float infinity = std::numeric_limits<float>::infinity();
  const bool bounded = op.act.kind == Act::Clamp && op.act.b == infinity;
  f.simple = !f.mask && !f.twin.data && (bounded || op.act.kind == Act::None);
  f.low = bounded ? op.act.a : -infinity;
  return a;
}

Range split_rows(const Member& m, const Step& s, int height) {
  if (s.choice.split == Split::Rows) return share(height, m);
  return s.choice.split == Split::None && m.part > 0 ? Range{0, 0} : Range{0, height};
}

/// The tile functions for a layer; tile_any when no column step was compiled in.
const Tile& tile_of(const Member& m, const Step& s) {
  const KernelSet& k = m.program.kernels;
  const int stride = s.op->window.sx;
  return stride == 1 ? k.tiles[s.choice.tile] : stride == 2 ? k.tiles_stride2[s.choice.tile] : *k.tile_any;
}

/// The entries of a stream this member computes: its part where channels are shared out, otherwise all.
template <class Entry>
Range entries(const Member& m, const Step& s, const Stream<Entry>& stream) {
  if (s.choice.split == Split::Channels && m.parts > 1) return {stream.parts[m.part], stream.parts[m.part + 1]};
  return {stream.parts.front(), stream.parts.back()};
}

void run_blocks(const Member& m, const Step& s, ConvArgs& a, const Tile& tile) {
  Rows rows[64];
  a.block_count = int(s.packed.blocks.size());
  for (int b = 0; b < a.block_count; b++) {
    const auto& t = s.packed.blocks[b];
    const Range own = entries(m, s, t);
    rows[b] = {t.channel.data(), t.start.data(), t.taps.data(), own.begin, own.end};
  }
  a.blocks = rows;
  (s.choice.method == Method::Tiles ? tile.conv : tile.conv_by_channel)(a);
}

/// The halos of the channels (and rows) this member has just computed.
template <class Entry>
void exchange_own(const Member& m, const Step& s, const Stream<Entry>& stream, int width, Range rows) {
  const Range own = entries(m, s, stream);
  for (size_t part = 0; part + 1 < stream.parts.size(); part++) {
    if (stream.parts[part] < own.begin || stream.parts[part + 1] > own.end) continue;
    const int begin = stream.parts[part] * width;
    int end = stream.parts[part + 1] * width;
    while (end > begin && stream.channel[end - 1] < 0) end--;  // the last four channels of a part may be fewer
    for (int value : {s.out, s.twin})
      if (value >= 0) exchange(m, value, stream.channel.data() + begin, 0, end - begin, rows);
  }
}

void run_conv(const Member& m, const Step& s) {
  ConvArgs a = conv_args(m, s);
  const Range rows = split_rows(m, s, a.y1);
  if (rows.begin == rows.end) return;
  a.y0 = rows.begin;
  a.y1 = rows.end;
  if (s.one_row) {
    a.x0 = rows.begin * a.x1;
    a.x1 = rows.end * a.x1;
    a.y0 = 0;
    a.y1 = 1;
  }
  const Tile& tile = tile_of(m, s);
  if (s.choice.method == Method::Quads) {
    const auto& q = s.packed.quads;
    const Range own = entries(m, s, q);
    a.quads = {q.channel.data(), q.start.data(), q.taps.data(), own.begin, own.end};
    tile.conv_quads(a);
    exchange_own(m, s, q, 4, rows);
  } else {
    run_blocks(m, s, a, tile);
    exchange_own(m, s, s.packed.blocks.back(), 1, rows);
  }
}

/// Some channels of a value, each from its own `step` floats further on, by a table that serves all of them.
void gather(const Member& m, int value, Range own, const float* from, long step, const std::vector<int32_t>& table,
            int32_t limit) {
  const Layout& to = layout(m, value);
  const Geometry& g = to.geometry;
  const bool halo = to.gathers_halo();
  GatherArgs a{};
  a.row = to.row();
  a.rows = halo ? g.top + g.height + g.bottom : g.height;
  a.width = int(table.size()) / a.rows / to.lanes.count;
  a.index = table.data();
  a.limit = limit;
  a.fill = g.fill;
  for (int c = own.begin; c < own.end; c++) {
    a.to = (halo ? m.arena.value(value) : m.arena.planes(value).data) + c * to.plane();
    a.from = from + c * step;
    m.program.kernels.gather(a);
  }
  if (!halo) exchange(m, value, own);
}

void run_gather(const Member& m, const Step& s) {
  const Layout& from = layout(m, s.in[0]);
  const long step = from.geometry.flat ? 1 : from.plane();
  gather(m, s.out, share(from.shape.c, m), m.arena.value(s.in[0]), step, s.table, INT32_MAX);
}

void run_pool(const Member& m, const Step& s) {
  const Window& w = s.op->window;
  const Layout& out = layout(m, s.out);
  const Range own = share(out.shape.c, m);
  PoolArgs a{};
  a.in = m.arena.planes(s.in[0]);
  a.in.data -= w.top * a.in.row + long(w.left) * out.lanes.count;
  a.out = m.arena.planes(s.out);
  a.row_step = a.in.row * w.sy;
  a.column_step = long(out.lanes.count) * w.sx;
  a.c0 = own.begin;
  a.c1 = own.end;
  a.y1 = out.geometry.height;
  a.width = out.geometry.width;
  a.distances = s.table.data();
  a.taps = int(s.table.size());
  a.scale = s.scale.empty() ? nullptr : s.scale.data();
  a.mask = out.mask();
  m.program.kernels.pool(a);
  exchange(m, s.out, own);
}

/// Vectors are short and rare: a scalar loop, then the activation through a linear layer without inputs.
void run_flat_map(const Member& m, const Step& s) {
  if (m.part > 0) return;
  const Op& op = *s.op;
  const bool affine = s.work == Work::Map && !op.scale.empty();
  const int channels = m.program.values[s.in[0]].shape.c;
  const long to_row = m.program.values[s.out].shape.c;
  for (int n = 0; n < m.program.lanes.images; n++) {
    const float* a = m.arena.value(s.in[0]) + long(n) * channels;
    float* out = m.arena.value(s.out) + n * to_row + s.channel;
    for (int c = 0; c < channels; c++) out[c] = affine ? op.scale[c] * a[c] + op.shift[c] : a[c];
    LinearArgs one{};
    one.in = one.dense = one.bias = one.out = out;
    one.residual = s.in.size() == 2 ? m.arena.value(s.in[1]) + long(n) * channels : nullptr;
    one.images = 1;
    one.outputs = one.o1 = channels;
    if (s.work == Work::Map) one.act = op.act;
    m.program.kernels.linear(one);
  }
}

void run_map(const Member& m, const Step& s) {
  if (m.program.values[s.out].geometry.flat) return run_flat_map(m, s);
  const Op& op = *s.op;
  const Layout& out = layout(m, s.out);
  const Range own = share(m.program.values[s.in[0]].shape.c, m);
  MapArgs a{};
  a.a = m.arena.planes(s.in[0]);
  if (s.in.size() == 2) a.b = m.arena.planes(s.in[1]);
  a.out = m.arena.planes(s.out);
  a.out.data += s.channel * a.out.plane;
  a.scale = op.scale.empty() ? nullptr : op.scale.data();
  a.shift = op.scale.empty() ? nullptr : op.shift.data();
  a.c0 = own.begin;
  a.c1 = own.end;
  a.y1 = out.geometry.height;
  a.width = out.geometry.width;
  if (s.work == Work::Map) a.act = op.act;
  a.mask = out.mask();
  m.program.kernels.map(a);
  exchange(m, s.out, {own.begin + s.channel, own.end + s.channel});
}

void run_mean(const Member& m, const Step& s) {
  const Layout& in = layout(m, s.in[0]);
  const Range own = share(in.shape.c, m);
  const float share_of_one = 1.0f / float(long(in.shape.h) * in.shape.w);
  m.program.kernels.mean({m.arena.planes(s.in[0]), own.begin, own.end, in.geometry.height, in.geometry.width,
                          in.lanes.images, in.shape.c, share_of_one, m.arena.value(s.out)});
}

void copy_images(const Member& m, int value, int count, Range channels, float* to) {
  const Layout& l = layout(m, value);
  const long step = l.geometry.flat ? 1 : l.plane(), size = l.shape.size();
  for (int n = 0; n < count; n++)
    for (int y = 0; y < l.shape.h; y++)
      for (int x = 0; x < l.shape.w; x++) {
        const float* from = m.arena.value(value) + l.address(n, y, x);
        float* p = to + n * size + long(y) * l.shape.w + x;
        for (long c = channels.begin; c < channels.end; c++) p[c * l.shape.h * l.shape.w] = from[c * step];
      }
}

void run_linear(const Member& m, const Step& s) {
  const Op& op = *s.op;
  LinearArgs a{};
  a.in = m.arena.value(s.in[0]);
  a.out = m.arena.value(s.out);
  a.residual = s.residual < 0 ? nullptr : m.arena.value(s.residual);
  a.dense = s.dense.empty() ? nullptr : s.dense.data();
  a.start = s.start.data();
  a.column = s.column.data();
  a.weight = op.weight.data();
  a.bias = op.bias.data();
  a.images = m.program.lanes.images;
  a.inputs = m.program.values[s.in[0]].shape.c;
  a.outputs = m.program.values[s.out].shape.c;
  const Range own = share(a.outputs, m);
  a.o0 = own.begin;
  a.o1 = own.end;
  a.act = op.act;
  m.program.kernels.linear(a);
}

}  // namespace

Extent extent(const Program& program, const Step& s) {
  const Geometry& out = program.values[s.out].geometry;
  return s.one_row ? Extent{1, out.height * out.width} : Extent{out.height, out.width};
}

void run_step(const Member& m, const Step& s) {
  switch (s.work) {
    case Work::Gather: return run_gather(m, s);
    case Work::Conv: return run_conv(m, s);
    case Work::Pool: return run_pool(m, s);
    case Work::Map:
    case Work::Copy: return run_map(m, s);
    case Work::Mean: return run_mean(m, s);
    case Work::Flatten:
      return copy_images(m, s.in[0], m.program.lanes.images, share(layout(m, s.in[0]).shape.c, m),
                         m.arena.value(s.out));
    case Work::Linear: return run_linear(m, s);
  }
}

void load_input(const Member& m, const float* images, int count) {
  const Layout& to = layout(m, 0);
  const Geometry& g = to.geometry;
  const long plane = long(to.shape.h) * to.shape.w;
  const auto& table = m.program.input_table;
  const Range own = share(to.shape.c, m);
  if (to.mask() || count < to.lanes.images)  // somebody's pixels are not there
    return gather(m, 0, own, images, plane, table, int32_t(count * to.shape.size()));
  const Planes planes = m.arena.planes(0);
  for (int c = own.begin; c < own.end; c++)  // the table begins with every lane's first pixel
    m.program.kernels.interleave({planes.data + c * planes.plane, planes.row, images + c * plane, table.data(),
                                  to.shape.w, g.height, g.width});
  exchange(m, 0, own);
}

void store_output(const Member& m, float* out, int count) {
  if (m.part > 0) return;
  copy_images(m, m.program.output, count, {0, layout(m, m.program.output).shape.c}, out);
}

}  // namespace dcil
