// A graph laid out for one arrangement of lanes: values with their layouts and buffers, and the steps between them.
#pragma once
#include <memory>
#include <vector>

#include "layout.h"
#include "step.h"

namespace dcil {

struct Value {
  Shape shape;
  Geometry geometry;
  std::unique_ptr<Layout> layout;
  bool nonnegative = false;
  int slot = -1;
  Quant quant;  // set: the value is u8
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
  const Lanes& lanes_of(const Value& value) const { return value.quant ? byte_lanes_ : lanes; }
  std::vector<Value> values;
  std::vector<std::unique_ptr<Step>> steps;
  std::vector<int> outputs;  // values
  std::vector<std::vector<int32_t>> input_tables;  // of every input of floats: see load_input

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
    long floats;  // of u8: a quarter of their number
    int from, until;
    long offset;
  };
  void assign_slots();
  int slot_for(const Value& value, int now);
  void place_slots();
  bool may_replace(const Step& step, int now, const std::vector<int>& last_read) const;

  const Lanes byte_lanes_;
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
  uint8_t* bytes(int v) const { return reinterpret_cast<uint8_t*>(value(v)); }
  BytePlanes byte_planes(int v) const { return program_.values[v].layout->planes(bytes(v)); }

 private:
  const Program& program_;
  float* data_;
};

}  // namespace dcil
