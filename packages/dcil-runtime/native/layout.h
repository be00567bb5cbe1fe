// Where pixels lie: lanes, sub-tiles, halos, and the tables that follow from them. The picture is in kernels.h.
#pragma once
#include <map>
#include <vector>

#include "aligned.h"
#include "graph.h"
#include "quant_kernels.h"

namespace dcil {

/// The lanes of a vector: `images` x a grid of `rows` x `columns` sub-tiles.
struct Lanes {
  int count, images, rows, columns;
  int bytes = 4;  // of an element; 1: u8
};
Lanes arrange(int lanes, int images);
/// Lanes of u8, in as many bytes as those of floats: every sub-tile becomes 2 x 2.
inline Lanes byte_lanes(const Lanes& l) { return {4 * l.count, l.images, 2 * l.rows, 2 * l.columns, 1}; }
/// The same images, each in one row of sub-tiles. u8 has no such layout.
inline Lanes in_line(const Lanes& l) { return {l.count, l.images, 1, l.rows * l.columns}; }

/// How one tensor lies in memory. Flat tensors are [image][channel]; the others [channel][row][column][lane].
struct Geometry {
  bool flat = false;
  bool line = false;          // one row of pixels (tokens): an image's lanes are a single row of sub-tiles
  int height = 1, width = 1;  // of a sub-tile
  int top = 0, left = 0, bottom = 0, right = 0;  // halo
  float fill = 0;                                // beyond the image
  bool operator==(const Geometry& o) const;
  bool same_tiles(const Geometry& o) const {
    return flat == o.flat && line == o.line && height == o.height && width == o.width;
  }
};

/// Flat, and the sub-tiles of a geometry without its halo.
inline Geometry flat_geometry() {
  Geometry g;
  g.flat = true;
  return g;
}
inline Geometry bare(const Geometry& tiles) {
  Geometry g;
  g.flat = tiles.flat;
  g.line = tiles.line;
  g.height = tiles.height;
  g.width = tiles.width;
  return g;
}

struct Move;

/// A tensor's geometry: its sizes at once, and with `build` the tables that are computed from it.
class Layout {
 public:
  Layout(const Shape& shape, const Geometry& geometry, const Lanes& lanes);
  void build();

  long floats() const { return (size_ * lanes.bytes + 3) / 4; }  // of a whole group of images
  Planes planes(float* base) const { return {base + origin_, plane_, row_}; }
  BytePlanes planes(uint8_t* base) const { return {base + origin_, plane_, row_}; }  // of u8
  /// The element that holds pixel (y, x) of an image in channel 0, from the buffer's start.
  long address(int image, int y, int x) const;
  /// Whoever gathers a plane leaves its halo to `moves`, unless these do not know what lies there: something else than
  /// zeros beyond the image, or pixels that no sub-tile holds, because the windows reach far and the output is small.
  bool gathers_halo() const {
    const bool covered = lanes.rows * geometry.height >= shape.h && lanes.columns * geometry.width >= shape.w;
    return !covered || geometry.fill != 0;
  }
  /// Is some of the halo never written, because no sub-tile holds it? Then its zeros must outlive the value.
  bool keeps_zeros() const { return keeps_zeros_; }
  bool inside(int lane, int y, int x) const;  // is this vector position a pixel of the image?
  long vectors() const { return long(geometry.height) * geometry.width; }  // of one channel, without the halo
  long halo_vectors() const;
  bool has_mask() const { return lanes.rows * geometry.height != shape.h || lanes.columns * geometry.width != shape.w; }

  const Shape shape;
  const Geometry geometry;
  const Lanes lanes;
  long plane() const { return plane_; }
  long row() const { return row_; }
  const int32_t* mask() const { return mask_.empty() ? nullptr : mask_.data(); }
  const uint8_t* byte_mask() const { return byte_mask_.empty() ? nullptr : byte_mask_.data(); }
  std::vector<Move> moves;  // fill the halo from the inner part; row y feeds moves_of_row[y] to moves_of_row[y + 1]
  std::vector<int> moves_of_row;
  Aligned<int32_t> orders;
  Aligned<uint8_t> byte_orders;  // the same for u8, above 127: beyond the image

 private:
  void build_mask();
  void build_moves();
  void narrow_tables();
  int order_of(int dy, int dx);

  long row_, plane_, origin_, size_;
  bool keeps_zeros_ = false;
  Aligned<int32_t> mask_;
  Aligned<uint8_t> byte_mask_;
  std::map<std::pair<int, int>, int> known_orders_;
};

/// For every float of channel 0 of `to` that is gathered, the index of its pixel given by `source(image, y, x)`, or -1
/// beyond the image.
template <class Source>
std::vector<int32_t> gather_table(const Layout& to, Source source);

}  // namespace dcil

#include "layout_gather.h"
