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

struct Row {
  int channel;
  int64_t begin, end;  // of op.index
};

/// What output channels keep of a block of inputs, the fullest first: the CPU foresees where a row ends when it is as
/// long as the one before, and a wrong guess costs as much as several taps.
std::vector<Row> rows_of(const Op& op, const Distances& where, const std::vector<int>& part, int low, int high) {
  std::vector<Row> rows;
  for (int o : part) {
    const auto from = op.index.begin() + op.start[o], to = op.index.begin() + op.start[o + 1];  // ascending
    const auto before = [&](uint32_t index, int input) { return where.input(index, o) < input; };
    const auto begin = std::lower_bound(from, to, low, before), end = std::lower_bound(begin, to, high, before);
    rows.push_back({o, begin - op.index.begin(), end - op.index.begin()});
  }
  const auto fuller = [](const Row& a, const Row& b) { return a.end - a.begin > b.end - b.begin; };
  std::stable_sort(rows.begin(), rows.end(), fuller);
  return rows;
}

Stream<Tap> pack_block(const Op& op, const Distances& where, const std::vector<std::vector<int>>& own, int low,
                       int high, bool skip_empty) {
  Stream<Tap> s;
  s.start.push_back(0);
  s.parts.push_back(0);
  for (const auto& part : own) {
    for (const Row& row : rows_of(op, where, part, low, high)) {
      if (skip_empty && row.begin == row.end) continue;
      for (int64_t i = row.begin; i < row.end; i++)
        s.taps.push_back({where.distance(op.index[i], row.channel), op.weight[i]});
      s.channel.push_back(row.channel);
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
