#include "tune.h"

#include <time.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <tuple>

namespace dcil {

namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// Layers with equal keys get equal choices.
using Key = std::tuple<int, int, int, int, int, int, int, int, int>;

class Tuner {
 public:
  Tuner(Program& program, Team& team, double seconds)
      : p_(program), team_(team), arena_(program), deadline_(now() + seconds) {
    layers_left_ = int(std::count_if(program.steps.begin(), program.steps.end(),
                                     [](const Step& s) { return s.work == Work::Conv; }));
    scratch_.assign(size_t(team.size()), Aligned<float>(size_t(program.scratch_floats())));
  }

  void conv(Step& step);
  void linear(Step& step);

 private:
  struct Trial {
    Choice choice;
    double seconds;
  };

  Member member(int part, int parts) { return {p_, arena_, scratch_[size_t(part)].data(), part, parts}; }
  double measure(const Step& step, int runs, bool together = false, double best = 1e30);
  void try_one(Step& step, const Choice& choice, int runs);
  void set(Step& step, const Choice& choice);
  std::vector<int> fitting_tiles(const Step& step) const;
  std::vector<Trial> best(size_t count);
  double density(const Step& step) const;
  Choice standard(const Step& step) const;
  void try_quads(Step& step);
  void search(Step& step);
  void replay(Step& step, std::vector<Trial> finalists);
  bool rows_suffice(const Step& step) const;
  void share_out(Step& step);
  Key key(const Step& step) const;

  Program& p_;
  Team& team_;
  Arena arena_;
  double deadline_, layer_deadline_ = 0;
  int layers_left_;
  std::vector<Aligned<float>> scratch_;
  std::vector<Trial> trials_;
  std::map<Key, Choice> known_;
};

/// The least of some runs, short ones several times.
/// One that is hopelessly slower than `best` runs only once.
double Tuner::measure(const Step& step, int runs, bool together, double best) {
  double least = 1e30;
  for (int i = 0; i < runs; i++) {
    if (i > 0 && (least > 1.5 * best || least > kLongRun)) break;
    const int times = i == 0 ? 1 : std::max(1, std::min(20, int(100e-6 / least)));  // reading the clock costs a bit
    const double begin = together ? now() : worked();
    for (int k = 0; k < times; k++) {
      if (together)
        team_.run([&](int part) { run_step(member(part, team_.size()), step); });
      else
        run_step(member(0, 1), step);
    }
    least = std::min(least, ((together ? now() : worked()) - begin) / times);
  }
  return least;
}

void Tuner::set(Step& step, const Choice& choice) {
  const bool repack = step.packed.blocks.empty() || choice.blocks != step.choice.blocks ||
                      choice.split != step.choice.split || choice.method == Method::Quads ||
                      step.choice.method == Method::Quads;
  step.choice = choice;
  if (repack) step.packed = pack(*step.op, *p_.values[step.in[0]].layout, choice, p_.threads);
}

void Tuner::try_one(Step& step, const Choice& choice, int runs) {
  if (!trials_.empty() && now() > layer_deadline_) return;
  set(step, choice);
  const double fastest = trials_.empty() ? 1e30 : best(1)[0].seconds;
  trials_.push_back({choice, measure(step, runs, false, fastest)});
}

/// Do tiles cover a plane? Where the output overwrites the residual they may not overlap: it would be added twice.
bool fits(const Tile& tile, int rows, int columns, bool in_place) {
  if (tile.rows > rows || tile.columns > columns) return false;
  return !in_place || (rows % tile.rows == 0 && columns % tile.columns == 0);
}

std::vector<int> Tuner::fitting_tiles(const Step& step) const {
  const Extent plane = extent(p_, step);
  std::vector<int> fit;
  if (step.op->window.sx > 2) return {0};
  for (int i = 0; i < p_.kernels.tile_count; i++)
    if (fits(p_.kernels.tiles[i], plane.height, plane.width, step.in_place)) fit.push_back(i);
  return fit;
}

std::vector<Tuner::Trial> Tuner::best(size_t count) {
  auto sorted = trials_;
  std::sort(sorted.begin(), sorted.end(), [](const Trial& a, const Trial& b) { return a.seconds < b.seconds; });
  sorted.resize(std::min(count, sorted.size()));
  return sorted;
}

double Tuner::density(const Step& step) const {
  const Window& w = step.op->window;
  const double inputs = double(p_.values[step.in[0]].shape.c) / step.op->groups;
  return double(step.op->weight.size()) / (double(step.op->bias.size()) * inputs * w.kh * w.kw);
}

/// Four channels at a time: worth a try where four channels often keep the same weight.
void Tuner::try_quads(Step& step) {
  if (density(step) < 0.15 || step.op->window.sx > 2) return;
  for (int t : fitting_tiles(step))
    if (p_.kernels.tiles[t].conv_quads && p_.kernels.tiles[t].rows * p_.kernels.tiles[t].columns > 1)
      try_one(step, {t, 1, Method::Quads, Split::None}, 3);
}

/// Every tile once; then, for the best few, the other loop order and more blocks; then the finalists again.
void Tuner::search(Step& step) {
  trials_.clear();
  const int inputs = p_.values[step.in[0]].shape.c;
  set(step, standard(step));
  if (measure(step, 1) > kLongRun && now() > deadline_) return;  // warms up
  try_quads(step);
  for (int t : fitting_tiles(step)) try_one(step, {t, 1, Method::Tiles, Split::None}, 3);
  const auto good = best(5);
  for (const Trial& t : good) {
    if (t.choice.method == Method::Quads) continue;
    try_one(step, {t.choice.tile, 1, Method::Channels, Split::None}, 3);
    double before = t.seconds;
    for (int blocks = 2; blocks <= 32 && inputs / blocks >= 8; blocks *= 2) {
      try_one(step, {t.choice.tile, blocks, Method::Tiles, Split::None}, 3);
      const double here = trials_.back().seconds;
      if (here > 1.2 * before) break;
      before = std::min(before, here);
    }
  }
  replay(step, best(6));
}

/// The finalists again, in turns: what else the machine does just now hits all of them.
void Tuner::replay(Step& step, std::vector<Trial> finalists) {
  for (int round = 0; round < 3 && (round == 0 || now() < layer_deadline_); round++)
    for (Trial& t : finalists) {
      set(step, t.choice);
      t.seconds = std::min(t.seconds, measure(step, 3));
    }
  const auto faster = [](const Trial& a, const Trial& b) { return a.seconds < b.seconds; };
  set(step, std::min_element(finalists.begin(), finalists.end(), faster)->choice);
}

/// What a layer gets without measuring: the largest tile that fits; four channels at a time when it is half full.
Choice Tuner::standard(const Step& step) const {
  Choice c;
  if (step.op->window.sx > 2) return c;
  const Tile* tiles = p_.kernels.tiles;
  const bool quads = density(step) > 0.5;
  for (int t : fitting_tiles(step)) {
    const bool larger = tiles[t].rows * tiles[t].columns > tiles[c.tile].rows * tiles[c.tile].columns;
    if (larger && (!quads || tiles[t].conv_quads)) c.tile = t;
  }
  if (quads) c.method = Method::Quads;
  return c;
}

/// Do tiles cover every thread's share of the rows?
bool Tuner::rows_suffice(const Step& step) const {
  const Geometry& g = p_.values[step.out].geometry;
  const Tile& tile = p_.kernels.tiles[step.choice.tile];
  const bool one_row = step.one_row;
  for (int part = 0; part < team_.size(); part++) {
    const Range own = share(g.height, part, team_.size());
    const int rows = own.end - own.begin;
    if (!fits(tile, one_row ? rows > 0 : rows, one_row ? rows * g.width : g.width, step.in_place)) return false;
  }
  return true;
}

/// With several threads: alone, by rows or by output channels, whichever is fastest.
void Tuner::share_out(Step& step) {
  if (team_.size() == 1 || now() > deadline_ + kLongRun) return;
  const Choice alone = step.choice;
  Choice fastest = alone;
  double least = measure(step, 4, true);
  for (Split split : {Split::Rows, Split::Channels}) {
    Choice c = alone;
    c.split = split;
    if (split == Split::Rows && !rows_suffice(step)) continue;
    set(step, c);
    const double t = measure(step, 4, true);
    if (t < least * 0.95) {
      least = t;
      fastest = c;
    }
  }
  set(step, fastest);
}

Key Tuner::key(const Step& s) const {
  const Window& w = s.op->window;
  const Layout &in = *p_.values[s.in[0]].layout, &out = *p_.values[s.out].layout;
  int bits = 0;  // kept weights to a quarter of a power of two
  for (double n = double(s.op->weight.size()) + 1; n > 1; n /= 1.19) bits++;
  return {in.shape.c, out.shape.c, w.kh * 100 + w.kw, w.sy * 100 + w.sx, out.geometry.height, out.geometry.width,
          bits, int(in.row()), s.op->groups + 100000 * (int(s.residual >= 0) + int(s.in_place) + 3 * int(s.twin >= 0))};
}

void Tuner::conv(Step& step) {
  layer_deadline_ = now() + 3 * std::max(0.0, deadline_ - now()) / std::max(1, layers_left_--);
  const auto k = key(step);
  const auto found = known_.find(k);
  if (found != known_.end()) return set(step, found->second);
  if (now() > deadline_) return set(step, standard(step));
  search(step);
  share_out(step);
  known_[k] = step.choice;
}

/// Dense rows or kept weights only, whichever is faster.
void Tuner::linear(Step& step) {
  const Op& op = *step.op;
  const size_t inputs = size_t(p_.values[step.in[0]].shape.c);
  for (int64_t s : op.start) step.start.push_back(int32_t(s));
  for (uint32_t i : op.index) step.column.push_back(int32_t(i % inputs));
  const double kept = measure(step, 3);
  step.dense.assign(op.bias.size() * inputs, 0.0f);
  for (size_t i = 0; i < op.index.size(); i++) step.dense[op.index[i]] = op.weight[i];
  if (measure(step, 3) < kept) {
    step.start = step.column = {};
  } else {
    step.dense = {};
  }
}

}  // namespace

double worked() {
#ifdef CLOCK_THREAD_CPUTIME_ID
  timespec t;
  if (clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t) == 0) return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
#endif
  return now();
}

void tune(Program& program, Team& team, double seconds) {
  Tuner tuner(program, team, seconds);
  for (Step& step : program.steps) {
    if (step.work == Work::Conv) tuner.conv(step);
    if (step.work == Work::Linear) tuner.linear(step);
  }
}

void run_steps(const Member& m, Team& team) {
  for (const Step& step : m.program.steps) {
    run_step(m, step);
    if (m.parts > 1) team.barrier.wait(m.parts);
  }
}

Seconds time_program(const Program& program, Team& team, Crew crew) {
  std::vector<std::unique_ptr<Arena>> arenas;
  for (int i = 0; i < (crew == Crew::Apart ? team.size() : 1); i++) arenas.push_back(std::make_unique<Arena>(program));
  std::vector<Aligned<float>> scratch(size_t(team.size()), Aligned<float>(size_t(program.scratch_floats())));
  const auto job = [&](int thread) {
    const bool together = crew == Crew::Together;
    const Arena& arena = *arenas[crew == Crew::Apart ? size_t(thread) : 0];
    float* const own = scratch[size_t(thread)].data();
    run_steps({program, arena, own, together ? thread : 0, together ? team.size() : 1}, team);
  };
  Seconds least{1e30, 1e30};
  const double begin = now();
  for (int i = 0; i < 20 && now() - begin < (i < 2 ? kLongRun : 0.1); i++) {
    const double wall = now(), work = worked();
    if (crew == Crew::Alone)
      job(0);
    else
      team.run(job);
    least = {std::min(least.wall, now() - wall), std::min(least.worked, worked() - work)};
  }
  return least;
}

}  // namespace dcil
