// A graph laid out for one arrangement of lanes: values with their layouts and buffers, and the steps between them.
#pragma once
#include <memory>
#include <vector>

#include "pack.h"

namespace dcil {

struct Value {
  Shape shape;
  Geometry geometry;
  std::unique_ptr<Layout> layout;
  bool nonnegative = false;
  int slot = -1;
};

enum class Work { Gather, Conv, Pool, Map, Copy, Mean, Flatten, Linear };

struct Step {
  Work work;
  const Op* op = nullptr;
  std::vector<int> in;  // values
  int out = -1, residual = -1, twin = -1;
  int channel = 0;             // Copy: first output channel
  bool in_place = false;       // Conv: the output overwrites the residual
  std::vector<int32_t> table;  // Gather: see gather_table; Pool: distances
  Aligned<float> scale;        // average pool
  // Linear: dense weights, or kept ones by row
  std::vector<float> dense;
  std::vector<int32_t> start, column;
  // Conv
  bool one_row = false;  // nothing has a halo and the window is one pixel: the plane is one long row
  Choice choice;
  Packed packed;
};

class Program {
 public:
  /// Plans only: what it will take is known (cost.h) before `build` allocates it.
  Program(const Graph& graph, const KernelSet& kernels, int images, int threads);
  void build();

  const Graph& graph;
  const KernelSet& kernels;
  const Lanes lanes;
  const int threads;
  std::vector<Value> values;
  std::vector<Step> steps;
  int output = 0;
  std::vector<int32_t> input_table;

  long arena_floats() const { return arena_; }    // one group of images
  long scratch_floats() const;                    // one thread
  long slot_offset(int slot) const { return slots_[slot].offset; }
  long packed_bytes() const;

 private:
  friend class Planner;
  /// Memory for one value after the other, and the first and last step that need it.
  struct Slot {
    Shape shape;
    Geometry geometry;
    bool keeps_zeros;
    long floats;
    int from, until;
    long offset;
  };
  bool is_one_row(const Step& step) const;
  void assign_slots();
  int slot_for(const Value& value, int now);
  void place_slots();
  bool may_overwrite_residual(const Step& step, int last_read) const;

  std::vector<Slot> slots_;
  long arena_ = 0;
};

/// The whole buffer memory of one group of images, zeroed (halos beyond the image stay so) and on large pages.
class Arena {
 public:
  explicit Arena(const Program& program);
  ~Arena();
  Arena(const Arena&) = delete;
  float* value(int v) const { return data_ + program_.slot_offset(program_.values[v].slot); }
  Planes planes(int v) const { return program_.values[v].layout->planes(value(v)); }

 private:
  const Program& program_;
  float* data_;
};

}  // namespace dcil
