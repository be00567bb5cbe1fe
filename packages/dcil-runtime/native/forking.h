// What a fork leaves behind: the child has one thread, and a copy of everything else as it was at that moment.
#pragma once
#include <mutex>

namespace dcil {

/// Counts the forks between the first process and this one. Threads that were started under another number are not in
/// this process: they can be neither joined nor woken.
unsigned fork_generation();

/// A mutex that fork waits for, so that a child finds it free and what it guards whole.
class ForkMutex {
 public:
  ForkMutex();
  ~ForkMutex();
  ForkMutex(const ForkMutex&) = delete;
  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  std::mutex mutex_;
};

}  // namespace dcil
