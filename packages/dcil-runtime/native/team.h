// A few threads that run one function together, and a barrier for them.
#pragma once
#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

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
  int size() const { return int(threads_.size()) + 1; }
  /// job(0) on the caller's thread and job(1), ... on the others; returns when all are done.
  void run(const std::function<void(int)>& job);

  Barrier barrier;

 private:
  void serve(int member);
  void stop();

  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<int> round_{0}, busy_{0};
  const std::function<void(int)>* job_ = nullptr;
  bool stop_ = false;
};

}  // namespace dcil
