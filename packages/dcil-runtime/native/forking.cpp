#include "forking.h"

#include <pthread.h>

#include <atomic>
#include <new>
#include <set>

namespace dcil {

namespace {

std::atomic<unsigned> generation{0};

/// Never destroyed: a process may fork while it exits.
struct Registry {
  std::mutex mutex;
  std::set<std::mutex*> all;
};

void lock_all();
void unlock_all();
void begin_child();

Registry& registry() {
  static Registry* const only = [] {
    if (pthread_atfork(lock_all, unlock_all, begin_child) != 0) throw std::bad_alloc();
    return new Registry;
  }();
  return *only;
}

/// No other thread ever holds two of these, so their order is free.
void lock_all() {
  registry().mutex.lock();
  for (std::mutex* one : registry().all) one->lock();
}

void unlock_all() {
  for (std::mutex* one : registry().all) one->unlock();
  registry().mutex.unlock();
}

void begin_child() {
  generation++;
  unlock_all();
}

}  // namespace

unsigned fork_generation() { return generation.load(std::memory_order_relaxed); }

ForkMutex::ForkMutex() {
  std::lock_guard<std::mutex> lock(registry().mutex);
  registry().all.insert(&mutex_);
}

ForkMutex::~ForkMutex() {
  std::lock_guard<std::mutex> lock(registry().mutex);
  registry().all.erase(&mutex_);
}

}  // namespace dcil
