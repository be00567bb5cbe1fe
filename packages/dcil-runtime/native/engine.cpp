#include "engine.h"

#include <algorithm>
#include <atomic>

namespace dcil {

Engine::Runner::Runner(const Program& program, int arena_count) : team(program.threads) {
  for (int i = 0; i < arena_count; i++) arenas.push_back(std::make_unique<Arena>(program));
  scratch.assign(size_t(program.threads), Aligned<float>(size_t(program.scratch_floats())));
}

Engine::Engine(Graph graph, const KernelSet& kernels, int threads, double tune_seconds)
    : graph_(std::move(graph)), kernels_(kernels), threads_(threads), tune_seconds_(tune_seconds) {
  const Cost cost = cost_of(Program(graph_, kernels_, 1, threads_));
  require_memory(graph_.bytes() + cost.peak(), graph_.limits());
  require_work(cost.work, graph_.limits());
}

/// Bytes held now, as they are counted against the limit.
double Engine::counted() const {
  double bytes = graph_.bytes();
  for (const auto& [images, p] : prepared_) bytes += p.bytes;
  return bytes;
}

/// Lays the network out for `images` per group and tunes it, once. The mutex is held.
Engine::Prepared& Engine::prepared(int images) {
  Prepared& p = prepared_[images];
  if (p.program) return p;
  auto program = std::make_unique<Program>(graph_, kernels_, images, threads_);
  p.bytes = cost_of(*program).kept();
  program->build();
  Team team(threads_);
  tune(*program, team, tune_seconds_);
  p.program = std::move(program);
  if (threads_ > 1) choose_crew(p, team);
  return p;
}

/// Threads that do not help stay out of it.
void Engine::choose_crew(Prepared& p, Team& team) const {
  const auto wall = [&](Crew crew) { return time_program(*p.program, team, crew).wall; };
  const double alone = wall(Crew::Alone);
  // A little gain on an idle machine is a loss on a busy one, where everybody waits for the last at every layer.
  p.together = wall(Crew::Together) < alone * 0.88;
  for (auto& step : p.program->steps)
    if (!p.together) step->unshare(*p.program);
  // Only a clear loss counts: on a core that somebody else keeps busy just now, groups apart take their turns.
  for (int i = 0; i < 3 && !p.apart && (i == 0 || alone < kLongRun); i++) {
    const double now = i ? wall(Crew::Alone) : alone;  // it may be busier by now
    p.apart = wall(Crew::Apart) < 1.15 * now * threads_;
  }
}

/// What an image takes in groups of `images`, measured when somebody asks.
double Engine::seconds(int images) {
  Prepared& p = prepared(images);
  Team alone(1);
  if (p.seconds == 0) p.seconds = time_program(*p.program, alone, Crew::Alone).worked / images;
  return p.seconds;
}

/// Larger groups are tried where they fit into the memory allowed, and where trying them does not take too long.
bool Engine::worth_trying(int images) {
  constexpr double longest = 4 * kLongRun;
  if (prepared_.count(images) && prepared_[images].program) return true;
  if (seconds(1) * images > longest) return false;
  try {
    const Cost cost = cost_of(Program(graph_, kernels_, images, threads_));
    return counted() + cost.peak() <= graph_.limits().memory;
  } catch (const Error&) {  // a tensor of so many images is larger than any may be
    return false;
  }
}

/// The arrangement for a batch: few images in large pieces stay in the cache, many need no halos; measured.
Engine::Prepared& Engine::prepared_for(int count) {
  int most = 1;
  while (most * 2 <= std::min(count, kernels_.lanes)) most *= 2;
  if (!chosen_.count(most)) {
    int best = 1;
    for (int images = 2; images <= most && worth_trying(images); images *= 2) {
      const double here = seconds(images), least = seconds(best);
      if (here < least) best = images;
      if (here > 1.15 * least) break;  // more will not be better
    }
    chosen_[most] = best;
  }
  return prepared(chosen_[most]);
}

std::unique_ptr<Engine::Runner> Engine::borrow(Prepared& p) {
  if (!p.idle.empty()) {
    auto runner = std::move(p.idle.back());
    p.idle.pop_back();
    return runner;
  }
  auto runner = std::make_unique<Runner>(*p.program, threads_);
  p.runners++;
  return runner;
}

void Engine::prepare(int count) {
  std::lock_guard<ForkMutex> lock(mutex_);
  prepared_for(count);
}

/// Whole numbers that the network can take.
void Engine::check_numbers(const void* const* in, int count) const {
  for (int i = 0; i < graph_.inputs(); i++) {
    if (graph_.type(i) != Type::Int64) continue;
    const int64_t below = graph_.below(i), low = below ? 0 : -kMostWhole, high = below ? below - 1 : kMostWhole;
    const int64_t* numbers = static_cast<const int64_t*>(in[i]);
    const auto* const end = numbers + count * graph_.shapes()[size_t(i)].size();
    const auto* wrong = std::find_if(numbers, end, [&](int64_t v) { return v < low || v > high; });
    if (wrong != end)
      throw Error("input " + std::to_string(i) + " must hold numbers from " + std::to_string(low) + " to " +
                  std::to_string(high) + ", got " + std::to_string(*wrong));
  }
}

void Engine::run(const void* const* in, int count, void* const* out) {
  check_numbers(in, count);
  std::unique_lock<ForkMutex> lock(mutex_);
  Prepared& p = prepared_for(count);
  auto runner = borrow(p);
  lock.unlock();
  run_groups(p, *runner, in, count, out);
  lock.lock();
  p.idle.push_back(std::move(runner));
}

void Engine::run_groups(const Prepared& p, Runner& r, const void* const* in, int count, void* const* out) const {
  const Program& program = *p.program;
  const int images = program.lanes.images, groups = (count + images - 1) / images;
  const auto group = [&](int g, const Member& m) {
    const int here = std::min(images, count - g * images);
    load_inputs(m, in, long(g) * images, here);
    if (m.parts > 1) r.team.barrier.wait(m.parts);
    run_steps(m, r.team);
    store_outputs(m, out, long(g) * images, here);
    if (m.parts > 1) r.team.barrier.wait(m.parts);
  };
  const auto member = [&](int thread, int arena, int parts) {
    return Member{program, *r.arenas[arena], r.scratch[thread].data(), parts > 1 ? thread : 0, parts};
  };
  if (groups >= threads_ && p.apart) {  // every thread has groups of its own
    std::atomic<int> next{0};
    r.team.run([&](int t) {
      for (int g = next++; g < groups; g = next++) group(g, member(t, t, 1));
    });
  } else if (p.together) {
    r.team.run([&](int t) {
      for (int g = 0; g < groups; g++) group(g, member(t, 0, threads_));
    });
  } else {
    for (int g = 0; g < groups; g++) group(g, member(0, 0, 1));
  }
}

std::string Engine::describe(int count) {
  std::lock_guard<ForkMutex> lock(mutex_);
  const Prepared& p = prepared_for(count);
  return "{\"images\":" + std::to_string(p.program->lanes.images) + ",\"layers_shared\":" +
         (p.together ? "true" : "false") + ",\"steps\":" + steps_json(*p.program) + "}";
}

long Engine::memory() const {
  std::lock_guard<ForkMutex> lock(mutex_);
  long bytes = 0;
  for (const Op& op : graph_.ops()) bytes += long(op.weight.size()) * 8 + long(op.table.size() + op.tokens.size()) * 4;
  for (const auto& [images, p] : prepared_) {
    if (!p.program) continue;
    const long runner = threads_ * (p.program->arena_floats() + p.program->scratch_floats()) * 4;
    bytes += p.program->packed_bytes() + p.runners * runner;
  }
  return bytes;
}

}  // namespace dcil
