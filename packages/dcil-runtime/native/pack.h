// Kept weights as the taps a kernel streams.
#pragma once
#include <vector>

#include "layout.h"

namespace dcil {

/// How a convolution is computed; chosen by measuring (tune.h).
enum class Method { Tiles, Channels, Quads };
enum class Split { None, Rows, Channels };  // how threads share one layer
struct Choice {
  int tile = 0, blocks = 1;
  Method method = Method::Tiles;
  Split split = Split::None;
};

template <class Entry>
struct Stream {
  std::vector<int32_t> channel, start;
  std::vector<Entry> taps;
  std::vector<int> parts;  // thread p computes entries parts[p] to parts[p + 1]
};

/// The weights of one convolution for one choice.
struct Packed {
  std::vector<Stream<Tap>> blocks;  // of input channels
  Stream<QuadTap> quads;
  long bytes() const;
};

Packed pack(const Op& op, const Layout& in, const Choice& choice, int threads);

/// Output channels dealt to `parts` threads so that each gets about the same number of weights; the fullest first,
/// which also keeps neighbouring loops of similar length.
std::vector<std::vector<int>> deal_channels(const Op& op, int parts);

}  // namespace dcil
