// A few threads that run one function together, and a barrier for them.
#pragma once
#include <atomic>
#include <functional>
#include <memory>

namespace dcil {

/// Spins a little before it yields: layers take microseconds, sleeping takes longer.
class Barrier {
 public:
  void wait(int members);

 private:
  std::atomic<int> arrived_{0}, round_{0};
};

class Team {
 public:
  explicit Team(int size);
  ~Team();
  int size() const { return size_; }
  /// job(0) on the caller's thread and job(1), ... on the others; returns when all are done. After a fork the child's
  /// first call starts threads of its own.
  void run(const std::function<void(int)>& job);

  Barrier barrier;

 private:
  class Crew;
  /// Gives up threads that a fork left in another process, with all that they may hold or wait on: it is leaked.
  void forget_lost();

  const int size_;
  std::unique_ptr<Crew> crew_;
};

}  // namespace dcil
