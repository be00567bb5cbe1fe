// Chooses how steps are computed by running them within a budget of time, and times whole programs.
#pragma once
#include <map>
#include <vector>

#include "execute.h"
#include "pack.h"

namespace dcil {

/// Seconds on the clock.
double now();
/// Seconds this thread has computed: what other processes take away does not count.
double worked();

/// Seconds; what takes longer is measured once.
constexpr double kLongRun = 1;

/// What steps choose with (Step::tune).
class Tuner {
 public:
  Tuner(Program& program, Team& team, double seconds);

  const Program& program() const { return p_; }
  int threads() const { return team_.size(); }
  /// The least of some runs, short ones several times. One that is hopelessly slower than `best` runs only once.
  double measure(const Step& step, int runs, bool together = false, double best = 1e30);

  /// When a step that searches should be done: its share of the time left, and more if others need less.
  double own_deadline();

  const double deadline;
  using Key = std::vector<int>;
  std::map<Key, Choice> known;  // convolutions with equal keys get equal choices

 private:
  Member member(int part, int parts) { return {p_, arena_, scratch_[size_t(part)].data(), part, parts}; }

  Program& p_;
  Team& team_;
  Arena arena_;
  std::vector<Aligned<float>> scratch_;
  int waiting_ = 0;  // steps that will search
};

/// Lets every step choose. Takes about `seconds` at most; without time left a layer gets a sensible default.
void tune(Program& program, Team& team, double seconds);

/// The smallest of a few runs: one thread on one group of images, a team that shares every layer of one group, or a
/// team whose every thread has a group of its own.
enum class Crew { Alone, Together, Apart };
struct Seconds {
  double wall, worked;  // worked: on the caller's thread
};
Seconds time_program(const Program& program, Team& team, Crew crew);

/// JSON: a list of the steps with their shapes, what the tuner chose, and the time of each, measured now.
std::string steps_json(const Program& program);

/// All steps, with a barrier after each when the team works together.
void run_steps(const Member& m, Team& team);

}  // namespace dcil
