#include "pack.h"

#include <algorithm>
#include <array>
#include <map>
#include <numeric>

namespace dcil {

namespace {

/// Turns a weight's position into the distance of the pixel it multiplies.
class Distances {
 public:
  Distances(const Op& op, const Layout& in) : w_(op.window), in_(in) {
    outputs_ = int(op.bias.size()) / op.groups;
    inputs_ = in.shape.c / op.groups;
  }
  int input(uint32_t index, int output) const {
    return output / outputs_ * inputs_ + int(index / uint32_t(w_.kh * w_.kw)) % inputs_;
  }
  int32_t distance(uint32_t index, int output) const {
    const int tap = int(index % uint32_t(w_.kh * w_.kw)), ky = tap / w_.kw, kx = tap % w_.kw;
    const long floats = input(index, output) * in_.plane() + long(ky) * w_.dy * in_.row() +
                        long(kx) * w_.dx * in_.lanes.count;
    return int32_t(floats * 4);
  }

 private:
  const Window& w_;
  const Layout& in_;
  int outputs_, inputs_;
};

Stream<Tap> pack_block(const Op& op, const Distances& where, const std::vector<std::vector<int>>& own, int low,
                       int high, bool skip_empty) {
  Stream<Tap> s;
  s.start.push_back(0);
  s.parts.push_back(0);
  for (const auto& part : own) {
    for (int o : part) {
      const size_t before = s.taps.size();
      for (int64_t i = op.start[o]; i < op.start[o + 1]; i++) {
        const int input = where.input(op.index[i], o);
        if (input >= low && input < high) s.taps.push_back({where.distance(op.index[i], o), op.weight[i]});
      }
      if (skip_empty && s.taps.size() == before) continue;
      s.channel.push_back(o);
      s.start.push_back(int32_t(s.taps.size()));
    }
    s.parts.push_back(int(s.channel.size()));
  }
  s.taps.shrink_to_fit();
  return s;
}

Stream<QuadTap> pack_quads(const Op& op, const Distances& where, std::vector<std::vector<int>> own) {
  Stream<QuadTap> s;
  s.start.push_back(0);
  s.parts.push_back(0);
  for (auto& part : own) {
    std::sort(part.begin(), part.end());  // neighbours: four of a group of channels share their inputs
    for (size_t first = 0; first < part.size(); first += 4) {
      std::map<int32_t, std::array<float, 4>> taps;
      for (size_t k = 0; k < 4; k++) {
        const int o = first + k < part.size() ? part[first + k] : -1;
        s.channel.push_back(o);
        for (int64_t i = o < 0 ? 0 : op.start[o]; o >= 0 && i < op.start[o + 1]; i++)
          taps[where.distance(op.index[i], o)][k] = op.weight[i];
      }
      for (const auto& [distance, w] : taps) s.taps.push_back({distance, {w[0], w[1], w[2], w[3]}});
      s.start.push_back(int32_t(s.taps.size()));
    }
    s.parts.push_back(int(s.channel.size() / 4));
  }
  s.taps.shrink_to_fit();
  return s;
}

}  // namespace

std::vector<std::vector<int>> deal_channels(const Op& op, int parts) {
  std::vector<int> order(op.bias.size());
  std::iota(order.begin(), order.end(), 0);
  const auto kept = [&](int o) { return op.start[o + 1] - op.start[o]; };
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return kept(a) > kept(b); });
  std::vector<std::vector<int>> own(parts);
  std::vector<int64_t> load(parts, 0);
  for (int o : order) {
    const auto least = std::min_element(load.begin(), load.end()) - load.begin();
    own[least].push_back(o);
    load[least] += kept(o) + 8;  // 8: about what finishing a channel costs
  }
  return own;
}

long Packed::bytes() const {
  size_t n = quads.taps.size() * sizeof(QuadTap) + (quads.channel.size() + quads.start.size()) * 4;
  for (const auto& b : blocks) n += b.taps.size() * sizeof(Tap) + (b.channel.size() + b.start.size()) * 4;
  return long(n);
}

Packed pack(const Op& op, const Layout& in, const Choice& choice, int threads) {
  const Distances where(op, in);
  const auto own = deal_channels(op, choice.split == Split::Channels ? threads : 1);
  Packed packed;
  if (choice.method == Method::Quads) {
    packed.quads = pack_quads(op, where, own);
    return packed;
  }
  for (int b = 0; b < choice.blocks; b++) {
    const int low = int(long(in.shape.c) * b / choice.blocks), high = int(long(in.shape.c) * (b + 1) / choice.blocks);
    const bool middle = b > 0 && b < choice.blocks - 1;
    packed.blocks.push_back(pack_block(op, where, own, low, high, middle));
  }
  return packed;
}

}  // namespace dcil
