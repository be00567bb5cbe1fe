#include "layout.h"

#include <algorithm>
#include <cstdlib>

namespace dcil {

Lanes arrange(int lanes, int images) {
  const int tiles = lanes / images;  // 1, 2, 4, 8 or 16
  const int rows = tiles >= 8 ? 4 : tiles >= 2 ? 2 : 1;
  return {lanes, images, rows, tiles / rows};
}

bool Geometry::operator==(const Geometry& o) const {
  return same_tiles(o) && top == o.top && left == o.left && bottom == o.bottom && right == o.right && fill == o.fill;
}

namespace {

int floor_div(int a, int b) { return (a >= 0 ? a : a - b + 1) / b; }

/// Does the halo along one side reach further than any of `tiles` sub-tiles of `size` has a neighbour?
bool beyond(int before, int size, int after, int tiles) {
  return -floor_div(-before, size) >= tiles || floor_div(size + after - 1, size) >= tiles;
}

/// Rows almost as long as the cache's sets are many would lie in each other's sets: they get longer.
long apart(long row, long line) {
  constexpr long sets = 64, least = 8;
  const long before = (row / line + least) / sets * sets;  // a multiple of the sets nearby
  return before && row / line > before - least ? std::max(row, (before + least) * line) : row;
}

}  // namespace

Layout::Layout(const Shape& s, const Geometry& g, const Lanes& grid)
    : shape(s), geometry(g), lanes(g.line ? in_line(grid) : grid) {
  const Lanes& l = lanes;
  if (g.flat) {
    row_ = plane_ = origin_ = 0;
    size_ = long(l.images) * s.c;
    if (double(size_) * 4 >= double(1L << 31)) throw Error("a tensor needs more than 2 GiB for one group of images");
    return;
  }
  const long line = 64 / l.bytes;  // elements in a cache line
  row_ = long(g.left + g.width + g.right) * l.count;
  if (g.left + g.right > 0 && g.height > 1) row_ = apart(row_, line);  // else a plane may be read as one row
  plane_ = row_ * (g.top + g.height + g.bottom);
  plane_ = ((plane_ + line - 1) / line | 1) * line;  // an odd number of lines spreads channels over the cache's sets
  origin_ = g.top * row_ + long(g.left) * l.count;
  if (double(plane_) * s.c * l.bytes >= double(1L << 31)) throw Error("a tensor needs more than 2 GiB for one group of images");
  size_ = plane_ * s.c;
  keeps_zeros_ = l.bytes == 4 && (beyond(g.top, g.height, g.bottom, l.rows) || beyond(g.left, g.width, g.right, l.columns));
}

void Layout::build() {
  if (geometry.flat) return;
  build_mask();
  build_moves();
  if (lanes.bytes == 1) narrow_tables();
}

/// Kernels for u8 read masks and orders of bytes.
void Layout::narrow_tables() {
  byte_mask_.assign(mask_.begin(), mask_.end());
  byte_orders.assign(orders.begin(), orders.end());
  mask_ = {};
  orders = {};
}

long Layout::halo_vectors() const {
  const Geometry& g = geometry;
  return long(g.top + g.height + g.bottom) * (g.left + g.width + g.right) - vectors();
}

long Layout::address(int image, int y, int x) const {
  if (geometry.flat) return long(image) * shape.c;
  const int row = y / geometry.height, column = x / geometry.width;
  const int lane = (image * lanes.rows + row) * lanes.columns + column;
  return origin_ + (y % geometry.height) * row_ + long(x % geometry.width) * lanes.count + lane;
}

bool Layout::inside(int lane, int y, int x) const {
  const int row = lane / lanes.columns % lanes.rows, column = lane % lanes.columns;
  return row * geometry.height + y < shape.h && column * geometry.width + x < shape.w;
}

void Layout::build_mask() {
  const Geometry& g = geometry;
  if (!has_mask()) return;
  mask_.reserve(size_t(vectors()) * lanes.count);
  for (int y = 0; y < g.height; y++)
    for (int x = 0; x < g.width; x++)
      for (int lane = 0; lane < lanes.count; lane++) mask_.push_back(inside(lane, y, x) ? -1 : 0);
}

namespace {

/// The permutation that fetches from the sub-tile `dy` rows down and `dx` columns right; empty if no lane has one.
std::vector<int32_t> lane_shift(const Lanes& l, int dy, int dx) {
  std::vector<int32_t> order;
  bool any = false;
  for (int lane = 0; lane < l.count; lane++) {
    const int image = lane / (l.rows * l.columns), y = lane / l.columns % l.rows + dy, x = lane % l.columns + dx;
    const bool there = y >= 0 && y < l.rows && x >= 0 && x < l.columns;
    order.push_back(there ? (image * l.rows + y) * l.columns + x : -1);
    any |= there;
  }
  return any ? order : std::vector<int32_t>();
}

}  // namespace

/// Which of `orders` fetches from the sub-tile (dy, dx) away; -1 when no lane has one there.
int Layout::order_of(int dy, int dx) {
  if (std::abs(dy) >= lanes.rows || std::abs(dx) >= lanes.columns) return -1;
  const auto found = known_orders_.find({dy, dx});
  if (found != known_orders_.end()) return found->second;
  const auto order = lane_shift(lanes, dy, dx);
  const int number = order.empty() ? -1 : int(orders.size()) / lanes.count;
  orders.insert(orders.end(), order.begin(), order.end());
  return known_orders_[{dy, dx}] = number;
}

/// Ordered by the row they come from, so that whoever computed some rows finds their moves in one piece. What no
/// sub-tile holds stays zero for ever: it was written when the buffer was made. For u8, where zero may be another
/// number, a move without an order writes it.
void Layout::build_moves() {
  const Geometry& g = geometry;
  std::vector<std::vector<Move>> from_row(size_t(g.height));
  const auto inner = [&](int y, int x) { return y >= 0 && y < g.height && x >= 0 && x < g.width; };
  const auto place = [&](int y, int x) { return int32_t(y * row_ + long(x) * lanes.count); };
  for (int y = -g.top; y < g.height + g.bottom; y++)
    for (int x = -g.left; x < g.width + g.right; x++) {
      const int dy = floor_div(y, g.height), dx = floor_div(x, g.width);
      const int order = dy || dx ? order_of(dy, dx) : -1;
      if (order < 0 && (lanes.bytes == 4 || inner(y, x))) continue;
      const int from_y = y - dy * g.height, from_x = x - dx * g.width;
      from_row[size_t(from_y)].push_back({place(y, x), place(from_y, from_x), order});
    }
  size_t count = 0;
  for (const auto& row : from_row) count += row.size();
  moves.reserve(count);
  for (const auto& row : from_row) {
    moves_of_row.push_back(int(moves.size()));
    moves.insert(moves.end(), row.begin(), row.end());
  }
  moves_of_row.push_back(int(moves.size()));
}

}  // namespace dcil
