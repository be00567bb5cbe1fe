// A convolution's tile, loop order, blocking and kernel, sparse or four channels at a time, and how threads share it.
#include <algorithm>
#include <map>

#include "../tune.h"
#include "conv.h"

namespace dcil {

namespace {

class ConvTuner {
 public:
  ConvTuner(Tuner& tuner, Conv& step) : tuner_(tuner), p_(tuner.program()), step_(step) {}
  void choose();

 private:
  struct Trial {
    Choice choice;
    double seconds;
  };

  void try_one(const Choice& choice, int runs);
  void set(const Choice& choice);
  std::vector<int> fitting_tiles() const;
  std::vector<Trial> best(size_t count);
  double density() const;
  Choice standard() const;
  int cached_blocks(const Tile& tile) const;
  bool valid(int blocks) const;
  void try_blocks(Trial from, bool more);
  void try_quads();
  void search();
  void replay(std::vector<Trial> finalists);
  bool rows_suffice() const;
  void share_out();
  Tuner::Key key() const;

  Tuner& tuner_;
  const Program& p_;
  Conv& step_;
  double own_deadline_ = 0;
  std::vector<Trial> trials_;
};

void ConvTuner::set(const Choice& choice) {
  const bool repack = step_.packed.blocks.empty() || choice.blocks != step_.chosen.blocks ||
                      choice.split != step_.chosen.split || choice.method == Method::Quads ||
                      step_.chosen.method == Method::Quads;
  step_.chosen = choice;
  if (repack) step_.packed = pack(*step_.op, *p_.values[step_.in[0]].layout, choice, p_.threads);
}

void ConvTuner::try_one(const Choice& choice, int runs) {
  if (!trials_.empty() && now() > own_deadline_) return;
  set(choice);
  const double fastest = trials_.empty() ? 1e30 : best(1)[0].seconds;
  trials_.push_back({choice, tuner_.measure(step_, runs, false, fastest)});
}

/// Do tiles cover a plane? Where the output overwrites the residual they may not overlap: it would be added twice.
bool fits(const Tile& tile, int rows, int columns, bool in_place) {
  if (tile.rows > rows || tile.columns > columns) return false;
  return !in_place || (rows % tile.rows == 0 && columns % tile.columns == 0);
}

std::vector<int> ConvTuner::fitting_tiles() const {
  const Extent plane = step_.extent(p_);
  std::vector<int> fit;
  if (step_.window.sx > 2) return {0};
  for (int i = 0; i < p_.kernels.tile_count; i++)
    if (fits(p_.kernels.tiles[i], plane.height, plane.width, step_.in_place)) fit.push_back(i);
  return fit;
}

std::vector<ConvTuner::Trial> ConvTuner::best(size_t count) {
  auto sorted = trials_;
  std::sort(sorted.begin(), sorted.end(), [](const Trial& a, const Trial& b) { return a.seconds < b.seconds; });
  sorted.resize(std::min(count, sorted.size()));
  return sorted;
}

double ConvTuner::density() const {
  const Window& w = step_.window;
  const double inputs = double(p_.values[step_.in[0]].shape.c) / step_.op->groups;
  return double(step_.op->weight.size()) / (double(step_.op->bias.size()) * inputs * w.kh * w.kw);
}

/// Four channels at a time: worth a try where four channels often keep the same weight.
void ConvTuner::try_quads() {
  if (density() < 0.15 || step_.window.sx > 2) return;
  for (int t : fitting_tiles())
    if (p_.kernels.tiles[t].conv_quads && p_.kernels.tiles[t].rows * p_.kernels.tiles[t].columns > 1)
      try_one({t, 1, Method::Quads, Split::None}, 3);
}

/// So many blocks, a power of two, that what a tile reads of one stays in the first cache; but a row keeps some weights.
int ConvTuner::cached_blocks(const Tile& tile) const {
  constexpr long cache = 32 << 10;
  const Window& w = step_.window;
  const long height = (tile.rows - 1) * w.sy + (w.kh - 1) * w.dy + 1;
  const long width = (tile.columns - 1) * w.sx + (w.kw - 1) * w.dx + 1;
  const long under = height * width * p_.lanes.count * 4 * p_.values[step_.in[0]].shape.c;
  const double kept = double(step_.op->weight.size()) / double(step_.op->bias.size());
  int blocks = 1;
  while (under / blocks > cache && kept / blocks > 8 && valid(2 * blocks)) blocks *= 2;
  return blocks;
}

bool ConvTuner::valid(int blocks) const {
  return blocks >= 1 && blocks <= 32 && (blocks == 1 || p_.values[step_.in[0]].shape.c / blocks >= 8);
}

/// More blocks, or fewer, as long as that helps.
void ConvTuner::try_blocks(Trial from, bool more) {
  double before = from.seconds;
  for (int b = from.choice.blocks;;) {
    b = more ? 2 * b : b / 2;
    if (!valid(b) || now() > own_deadline_) return;
    try_one({from.choice.tile, b, Method::Tiles, Split::None}, 3);
    if (trials_.back().seconds > 1.1 * before) return;
    before = std::min(before, trials_.back().seconds);
  }
}

/// Every tile once; then, for the best few, the other loop order and other blocks; then the finalists again.
void ConvTuner::search() {
  trials_.clear();
  set(standard());
  if (tuner_.measure(step_, 1) > kLongRun && now() > tuner_.deadline) return;  // warms up
  std::multimap<int, int> tiles;  // by blocks: packed once for all that have the same
  for (int t : fitting_tiles()) tiles.insert({cached_blocks(p_.kernels.tiles[t]), t});
  for (const auto& [blocks, t] : tiles) try_one({t, blocks, Method::Tiles, Split::None}, 3);
  const auto good = best(5);
  for (const Trial& t : good) {
    try_one({t.choice.tile, 1, Method::Channels, Split::None}, 3);
    try_blocks(t, true);
    try_blocks(t, false);
  }
  try_quads();
  replay(best(6));
}

/// The finalists again, in turns: what else the machine does just now hits all of them.
void ConvTuner::replay(std::vector<Trial> finalists) {
  for (int round = 0; round < 3 && (round == 0 || now() < own_deadline_); round++)
    for (Trial& t : finalists) {
      set(t.choice);
      t.seconds = std::min(t.seconds, tuner_.measure(step_, 3));
    }
  const auto faster = [](const Trial& a, const Trial& b) { return a.seconds < b.seconds; };
  set(std::min_element(finalists.begin(), finalists.end(), faster)->choice);
}

/// What a layer gets without measuring: the largest tile that fits; four channels at a time when it is half full.
Choice ConvTuner::standard() const {
  Choice c;
  if (step_.window.sx > 2) return c;
  const Tile* tiles = p_.kernels.tiles;
  const bool quads = density() > 0.5;
  for (int t : fitting_tiles()) {
    const bool larger = tiles[t].rows * tiles[t].columns > tiles[c.tile].rows * tiles[c.tile].columns;
    if (larger && (!quads || tiles[t].conv_quads)) c.tile = t;
  }
  if (quads) c.method = Method::Quads;
  return c;
}

/// Do tiles cover every thread's share of the rows?
bool ConvTuner::rows_suffice() const {
  const Geometry& g = p_.values[step_.out].geometry;
  const Tile& tile = p_.kernels.tiles[step_.chosen.tile];
  const bool one_row = step_.one_row;
  for (int part = 0; part < tuner_.threads(); part++) {
    const Range own = share(g.height, part, tuner_.threads());
    const int rows = own.end - own.begin;
    if (!fits(tile, one_row ? rows > 0 : rows, one_row ? rows * g.width : g.width, step_.in_place)) return false;
  }
  return true;
}

/// With several threads: alone, by rows or by output channels, whichever is fastest.
void ConvTuner::share_out() {
  if (tuner_.threads() == 1 || now() > tuner_.deadline + kLongRun) return;
  const Choice alone = step_.chosen;
  Choice fastest = alone;
  double least = tuner_.measure(step_, 4, true);
  for (Split split : {Split::Rows, Split::Channels}) {
    Choice c = alone;
    c.split = split;
    if (split == Split::Rows && !rows_suffice()) continue;
    set(c);
    const double t = tuner_.measure(step_, 4, true);
    if (t < least * 0.95) {
      least = t;
      fastest = c;
    }
  }
  set(fastest);
}

Tuner::Key ConvTuner::key() const {
  const Conv& s = step_;
  const Window& w = s.window;
  const Layout &in = *p_.values[s.in[0]].layout, &out = *p_.values[s.out].layout;
  int bits = 0;  // kept weights to a quarter of a power of two
  for (double n = double(s.op->weight.size()) + 1; n > 1; n /= 1.19) bits++;
  return {0, in.shape.c, out.shape.c, w.kh, w.kw, w.sy, w.sx, out.geometry.height, out.geometry.width, s.one_row, bits,
          int(in.row()), s.op->groups, s.residual >= 0, s.in_place, s.twin >= 0};
}

void ConvTuner::choose() {
  own_deadline_ = tuner_.own_deadline();
  const auto k = key();
  const auto found = tuner_.known.find(k);
  if (found != tuner_.known.end()) return set(found->second);
  if (now() > tuner_.deadline) return set(standard());
  search();
  share_out();
  tuner_.known[k] = step_.chosen;
}

}  // namespace

void Conv::tune(Tuner& tuner) { ConvTuner(tuner, *this).choose(); }

}  // namespace dcil
