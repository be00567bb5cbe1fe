// A network ready to run: prepared once per arrangement of lanes, then called from any number of threads.
#pragma once
#include <map>
#include <memory>
#include <mutex>

#include "cost.h"
#include "forking.h"
#include "tune.h"

namespace dcil {

class Engine {
 public:
  /// Throws Error where the graph's limits do not allow what it asks for.
  Engine(Graph graph, const KernelSet& kernels, int threads, double tune_seconds);

  /// Image n of every output = network(image n of every input) for `count` images; throws Error for whole numbers that
  /// no row of an embedding belongs to.
  void run(const void* const* in, int count, void* const* out);
  /// The same for a network of one input and one output.
  void run(const float* in, int count, float* out) {
    const void* const from[] = {in};
    void* const to[] = {out};
    run(from, count, to);
  }
  /// Prepares for this many images, as the first run would.
  void prepare(int count);
  std::string describe(int count);  // JSON: the steps, their choices and times
  long memory() const;  // bytes held now, weights and buffers
  const Graph& graph() const { return graph_; }
  const KernelSet& kernels() const { return kernels_; }

 private:
  /// Everything one call writes to. Calls never share one.
  struct Runner {
    Runner(const Program& program, int arenas);
    Team team;
    std::vector<std::unique_ptr<Arena>> arenas;
    std::vector<Aligned<float>> scratch;
  };
  struct Prepared {
    std::unique_ptr<Program> program;
    bool together = false;  // does a team that shares every layer beat one thread?
    bool apart = false;     // does a team whose threads have a group of images each?
    double seconds = 0;     // per image; 0: not measured yet
    double bytes = 0;       // counted against the limit
    std::vector<std::unique_ptr<Runner>> idle;
    int runners = 0;
  };

  Prepared& prepared_for(int count);
  Prepared& prepared(int images);
  void choose_crew(Prepared& p, Team& team) const;
  double seconds(int images);
  bool worth_trying(int images);
  double counted() const;
  std::unique_ptr<Runner> borrow(Prepared& p);
  void run_groups(const Prepared& p, Runner& r, const void* const* in, int count, void* const* out) const;
  void check_numbers(const void* const* in, int count) const;

  const Graph graph_;
  const KernelSet& kernels_;
  const int threads_;
  const double tune_seconds_;
  mutable ForkMutex mutex_;
  std::map<int, Prepared> prepared_;  // by images per group
  std::map<int, int> chosen_;         // largest power of two that fits -> images per group
};

}  // namespace dcil
