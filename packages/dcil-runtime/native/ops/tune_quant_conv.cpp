// An int8 convolution's tile, how many channels share their inputs, and how threads share it: by measuring.
#include <algorithm>

#include "../tune.h"
#include "quant_conv.h"

namespace dcil {

namespace {

class QuantTuner {
 public:
  QuantTuner(Tuner& tuner, QuantConv& step) : tuner_(tuner), p_(tuner.program()), step_(step) {}
  void choose();

 private:
  void set(const QuantChoice& choice);
  bool fits(const QuantTile& tile, int rows, int columns) const;
  std::vector<int> fitting_tiles() const;
  double measure(const QuantChoice& choice, int runs, double best, bool together = false);
  void search();
  void share_out();
  bool rows_suffice() const;
  Tuner::Key key() const;

  Tuner& tuner_;
  const Program& p_;
  QuantConv& step_;
};

void QuantTuner::set(const QuantChoice& choice) {
  const auto width = [&](const QuantChoice& c) { return p_.kernels.quant->tiles[c.tile].width; };
  const bool repack = step_.packed.start.empty() || width(choice) != width(step_.chosen) ||
                      (choice.split == Split::Channels) != (step_.chosen.split == Split::Channels);
  step_.chosen = choice;
  const int parts = choice.split == Split::Channels ? p_.threads : 1;
  if (repack) step_.packed = pack_groups(*step_.op, *p_.values[size_t(step_.in[0])].layout, width(choice), parts);
}

/// Where the output overwrites the residual, tiles may not overlap: it would be added twice.
bool QuantTuner::fits(const QuantTile& tile, int rows, int columns) const {
  if (tile.rows > rows || tile.columns > columns) return false;
  return !step_.in_place || (rows % tile.rows == 0 && columns % tile.columns == 0);
}

std::vector<int> QuantTuner::fitting_tiles() const {
  const Geometry& g = p_.values[size_t(step_.out)].geometry;
  const int rows = step_.one_row ? 1 : g.height, columns = step_.one_row ? g.height * g.width : g.width;
  std::vector<int> fit;
  for (int i = 0; i < p_.kernels.quant->tile_count; i++)
    if (fits(p_.kernels.quant->tiles[i], rows, columns)) fit.push_back(i);
  return fit;
}

double QuantTuner::measure(const QuantChoice& choice, int runs, double best, bool together) {
  set(choice);
  return tuner_.measure(step_, runs, together, best);
}

/// Every tile, then the best few again, in turns.
void QuantTuner::search() {
  const double end = tuner_.own_deadline();
  std::vector<std::pair<double, int>> trials;
  set({});
  if (tuner_.measure(step_, 1) > kLongRun && now() > tuner_.deadline) return;  // warms up
  for (int t : fitting_tiles()) {
    if (!trials.empty() && now() > end) break;
    const double best = trials.empty() ? 1e30 : std::min_element(trials.begin(), trials.end())->first;
    trials.push_back({measure({t, Split::None}, 3, best), t});
  }
  std::sort(trials.begin(), trials.end());
  trials.resize(std::min<size_t>(trials.size(), 3));
  for (int round = 0; round < 3 && now() < end; round++)
    for (auto& [seconds, t] : trials) seconds = std::min(seconds, measure({t, Split::None}, 3, 1e30));
  set({std::min_element(trials.begin(), trials.end())->second, Split::None});
}

/// Do tiles cover every thread's share of the rows?
bool QuantTuner::rows_suffice() const {
  const Geometry& g = p_.values[size_t(step_.out)].geometry;
  for (int part = 0; part < tuner_.threads(); part++) {
    const Range own = share(g.height, part, tuner_.threads());
    const int rows = own.end - own.begin, flat = step_.one_row ? rows * g.width : g.width;
    if (!fits(p_.kernels.quant->tiles[step_.chosen.tile], step_.one_row ? rows > 0 : rows, flat)) return false;
  }
  return true;
}

void QuantTuner::share_out() {
  if (tuner_.threads() == 1 || now() > tuner_.deadline + kLongRun) return;
  QuantChoice fastest = step_.chosen;
  double least = measure(fastest, 4, 1e30, true);
  for (Split split : {Split::Rows, Split::Channels}) {
    const QuantChoice choice{fastest.tile, split};
    if (split == Split::Rows && !rows_suffice()) continue;
    const double t = measure(choice, 4, 1e30, true);
    if (t < least * 0.95) least = t, fastest = choice;
  }
  set(fastest);
}

Tuner::Key QuantTuner::key() const {
  const QuantConv& s = step_;
  const Window& w = s.window;
  const Layout &in = *p_.values[size_t(s.in[0])].layout, &out = *p_.values[size_t(s.out)].layout;
  int bits = 0;  // kept weights to a quarter of a power of two
  for (double n = double(s.op->weight.size()) + 1; n > 1; n /= 1.19) bits++;
  return {1, in.shape.c, out.shape.c, w.kh, w.kw, w.sy, w.sx, out.geometry.height, out.geometry.width, s.one_row, bits,
          int(in.row()), s.op->groups, s.residual >= 0, s.in_place, s.twin >= 0};  // 1: no key of a convolution of floats
}

void QuantTuner::choose() {
  const auto k = key();
  const auto found = tuner_.known.find(k);
  if (found != tuner_.known.end()) {
    tuner_.own_deadline();
    return set({found->second.tile, found->second.split});
  }
  if (now() > tuner_.deadline) return set({fitting_tiles().back(), Split::None});
  search();
  share_out();
  Choice choice;
  choice.tile = step_.chosen.tile;
  choice.split = step_.chosen.split;
  tuner_.known[k] = choice;
}

}  // namespace

void QuantConv::tune(Tuner& tuner) { QuantTuner(tuner, *this).choose(); }

}  // namespace dcil
