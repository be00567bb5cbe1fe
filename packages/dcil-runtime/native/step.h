// One thing to do in a program, as every kind of it offers. The kinds are in ops/, beside the operators that plan them.
#pragma once
#include <string>
#include <vector>

namespace dcil {

struct Cost;
struct Member;
struct Op;
class Program;
class Tuner;

class Step {
 public:
  Step(const char* name, const Op* op, std::vector<int> in, int out)
      : name(name), op(op), in(std::move(in)), out(out) {}
  virtual ~Step() = default;
  Step(const Step&) = delete;

  /// Called once when the layouts of all values are known, before anything is allocated.
  virtual void settle(const Program&) {}
  /// Adds what the step will take; everything that `build` and `tune` allocate needs a line here.
  virtual void add_cost(const Program&, Cost&) const = 0;
  /// Computes tables once from the layouts.
  virtual void build(const Program&) {}
  /// Chooses between kernels by measuring them.
  virtual void tune(Tuner&) {}
  virtual bool searches() const { return false; }  // does that take a share of the time for tuning?
  /// Called when threads will not share this step: back to what suits one thread.
  virtual void unshare(const Program&) {}
  /// Computes this member's part. Allocates nothing and throws nothing.
  virtual void run(const Member&) const = 0;

  virtual long bytes() const { return 0; }                    // tables and packed weights, held now
  virtual long scratch_floats(const Program&) const { return 0; }  // one thread's memory while it runs
  virtual int replaceable() const { return -1; }              // the operand whose memory the output may take; -1: none
  virtual std::string choice(const Program&) const { return {}; }  // what tuning chose, for people
  virtual long macs(const Program&) const { return 0; }            // multiply-adds of kept weights, for a group of images

  std::vector<int> reads() const;
  std::vector<int> writes() const;

  const char* const name;
  const Op* const op;  // null: a copy into another layout
  const std::vector<int> in;  // values
  const int out;
  int residual = -1, twin = -1;  // further values that it reads and writes
  bool in_place = false;         // the output has taken the memory of `replaceable`
};

inline std::vector<int> Step::reads() const {
  std::vector<int> all = in;
  if (residual >= 0) all.push_back(residual);
  return all;
}

inline std::vector<int> Step::writes() const {
  return twin >= 0 ? std::vector<int>{out, twin} : std::vector<int>{out};
}

}  // namespace dcil
