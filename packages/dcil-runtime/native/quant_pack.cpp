#include "quant_pack.h"

#include <algorithm>
#include <array>
#include <map>

namespace dcil {

namespace {

/// The input that a weight multiplies, in bytes from the first.
int32_t distance_of(const Op& op, const Layout& in, uint32_t index, int output) {
  const Window& w = op.window;
  const int tap = int(index % uint32_t(w.kh * w.kw)), ky = tap / w.kw, kx = tap % w.kw;
  const int inputs = in.shape.c / op.groups, outputs = int(op.bias.size()) / op.groups;
  const int input = output / outputs * inputs + int(index / uint32_t(w.kh * w.kw)) % inputs;
  return int32_t(input * in.plane() + long(ky) * w.dy * in.row() + long(kx) * w.dx * in.lanes.count);
}

using Taps = std::map<int32_t, std::array<int8_t, 4>>;  // by distance: the weights of up to four channels

/// Four inputs at a time; the last group is filled up with weights of zero.
void append_groups(const Taps& taps, int width, std::vector<int32_t>& stream) {
  auto tap = taps.begin();
  for (size_t done = 0; done < taps.size(); done += 4) {
    int32_t distance[4], last = tap->first;
    uint32_t weights[4] = {};
    for (int i = 0; i < 4; i++) {
      distance[i] = last;
      if (tap == taps.end()) continue;
      distance[i] = last = tap->first;
      for (int k = 0; k < width; k++) weights[k] |= uint32_t(uint8_t(tap->second[size_t(k)])) << (8 * i);
      ++tap;
    }
    stream.insert(stream.end(), distance, distance + 4);
    for (int k = 0; k < width; k++) stream.push_back(int32_t(weights[k]));
  }
}

}  // namespace

PackedGroups pack_groups(const Op& op, const Layout& in, int width, int parts) {
  PackedGroups packed;
  packed.start.push_back(0);
  packed.parts.push_back(0);
  for (auto part : deal_channels(op, parts)) {
    if (width > 1) std::sort(part.begin(), part.end());  // neighbours: those of a group of channels share their inputs
    for (size_t first = 0; first < part.size(); first += size_t(width)) {
      Taps taps;
      for (int k = 0; k < width; k++) {
        const int o = first + size_t(k) < part.size() ? part[first + size_t(k)] : -1;
        packed.channel.push_back(o);
        for (int64_t i = o < 0 ? 0 : op.start[size_t(o)]; o >= 0 && i < op.start[size_t(o) + 1]; i++)
          taps[distance_of(op, in, op.index[size_t(i)], o)][size_t(k)] = int8_t(op.weight[size_t(i)]);
      }
      append_groups(taps, width, packed.stream);
      packed.start.push_back(int32_t(packed.stream.size()) / (4 + width));
    }
    packed.parts.push_back(int(packed.channel.size()) / width);
  }
  packed.stream.shrink_to_fit();
  return packed;
}

}  // namespace dcil
