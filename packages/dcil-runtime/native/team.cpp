#include "team.h"

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "forking.h"

namespace dcil {

namespace {

/// Waits until `done`, first by looking, then by giving the core away.
template <class Done>
void watch(Done done) {
  for (int i = 0; !done(); i++)
    if (i > 2000) std::this_thread::yield();
}

}  // namespace

void Barrier::wait(int members) {
  const int round = round_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == members - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    round_.store(round + 1, std::memory_order_release);
  } else {
    watch([&] { return round_.load(std::memory_order_acquire) != round; });
  }
}

/// The threads besides the caller's, and what they wait on.
class Team::Crew {
 public:
  explicit Crew(int others);
  ~Crew() { stop(); }
  void run(const std::function<void(int)>& job);
  const unsigned generation = fork_generation();

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

Team::Crew::Crew(int others) {
  try {
    for (int i = 1; i <= others; i++) threads_.emplace_back([this, i] { serve(i); });
  } catch (...) {  // the system has no more threads
    stop();
    throw;
  }
}

void Team::Crew::stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    round_.fetch_add(1);
  }
  wake_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void Team::Crew::run(const std::function<void(int)>& job) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    job_ = &job;
    busy_.store(int(threads_.size()));
    round_.fetch_add(1);
  }
  wake_.notify_all();
  job(0);
  watch([&] { return busy_.load(std::memory_order_acquire) == 0; });
}

void Team::Crew::serve(int member) {
  for (int seen = 0;;) {
    // The next job often comes at once; a sleeping thread would miss most of it.
    const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(100);
    while (round_.load() == seen && std::chrono::steady_clock::now() < until) {
    }
    const std::function<void(int)>* job;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [&] { return round_.load() != seen; });
      seen = round_.load();
      if (stop_) return;
      job = job_;
    }
    (*job)(member);
    busy_.fetch_sub(1, std::memory_order_acq_rel);
  }
}

Team::Team(int size) : size_(size) {
  if (size > 1) crew_ = std::make_unique<Crew>(size - 1);
}

Team::~Team() { forget_lost(); }

void Team::forget_lost() {
  if (crew_ && crew_->generation != fork_generation()) (void)crew_.release();
}

void Team::run(const std::function<void(int)>& job) {
  if (size_ == 1) return job(0);
  forget_lost();
  if (!crew_) crew_ = std::make_unique<Crew>(size_ - 1);
  crew_->run(job);
}

}  // namespace dcil
