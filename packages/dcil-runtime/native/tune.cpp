#include "tune.h"

#include <time.h>

#include <algorithm>
#include <chrono>
#include <memory>

namespace dcil {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double worked() {
#ifdef CLOCK_THREAD_CPUTIME_ID
  timespec t;
  if (clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t) == 0) return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
#endif
  return now();
}

Tuner::Tuner(Program& program, Team& team, double seconds)
    : deadline(now() + seconds), p_(program), team_(team), arena_(program) {
  scratch_.assign(size_t(team.size()), Aligned<float>(size_t(program.scratch_floats())));
  for (const auto& step : program.steps) waiting_ += step->searches();
}

double Tuner::measure(const Step& step, int runs, bool together, double best) {
  double least = 1e30;
  for (int i = 0; i < runs; i++) {
    if (i > 0 && (least > 1.5 * best || least > kLongRun)) break;
    const int times = i == 0 ? 1 : std::max(1, std::min(20, int(100e-6 / least)));  // reading the clock costs a bit
    const double begin = together ? now() : worked();
    for (int k = 0; k < times; k++) {
      if (together)
        team_.run([&](int part) { step.run(member(part, team_.size())); });
      else
        step.run(member(0, 1));
    }
    least = std::min(least, ((together ? now() : worked()) - begin) / times);
  }
  return least;
}

double Tuner::own_deadline() { return now() + 3 * std::max(0.0, deadline - now()) / std::max(1, waiting_--); }

void tune(Program& program, Team& team, double seconds) {
  Tuner tuner(program, team, seconds);
  for (auto& step : program.steps) step->tune(tuner);
}

void run_steps(const Member& m, Team& team) {
  for (const auto& step : m.program.steps) {
    step->run(m);
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
