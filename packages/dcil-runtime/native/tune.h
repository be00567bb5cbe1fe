// Chooses how each layer is computed by running it: which tile, loop order and blocking, sparse or four channels at a
// time, and how threads share it.
#pragma once
#include "execute.h"

namespace dcil {

/// Seconds this thread has computed: what other processes take away does not count.
double worked();

/// Sets every layer's choice and packs its weights. Takes about `seconds` at most; without time left a layer gets a
/// sensible default.
void tune(Program& program, Team& team, double seconds);

/// Seconds; what takes longer is measured once.
constexpr double kLongRun = 1;

/// The smallest of a few runs: one thread on one group of images, a team that shares every layer of one group, or a
/// team whose every thread has a group of its own.
enum class Crew { Alone, Together, Apart };
struct Seconds {
  double wall, worked;  // worked: on the caller's thread
};
Seconds time_program(const Program& program, Team& team, Crew crew);

/// One line per step: shapes, choice, microseconds and, for convolutions, GFLOP/s of kept weights.
std::string describe(const Program& program);

/// All steps, with a barrier after each when the team works together.
void run_steps(const Member& m, Team& team);

}  // namespace dcil
