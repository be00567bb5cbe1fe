// Decides how every tensor lies, operator by operator, and inserts copies where a consumer needs another layout.
#pragma once
#include <map>
#include <tuple>

#include "operator.h"
#include "program.h"

namespace dcil {

/// What operators plan with (Operator::plan).
class Planner {
 public:
  explicit Planner(Program& program) : p_(program) {}
  void plan();

  /// The value that holds a tensor of the graph.
  int value_of(int tensor);
  void set_value(int tensor, int value) { value_of_[size_t(tensor)] = value; }
  /// The value that holds a quantized tensor as u8.
  int bytes_of(int tensor) const { return bytes_of_[size_t(tensor)]; }
  void set_bytes(int tensor, int value) { bytes_of_[size_t(tensor)] = value; }
  const Quant& quant_of(int tensor) const { return p_.graph.quant(tensor); }
  const Value& value(int v) const { return p_.values[size_t(v)]; }
  const Shape& shape_of(int tensor) const { return p_.graph.shapes()[size_t(tensor)]; }

  int add_value(Shape shape, Geometry geometry, bool nonnegative);
  int add_bytes(Shape shape, Geometry geometry, const Quant& quant);
  template <class Kind, class... Arguments>
  Kind& add_step(Arguments&&... arguments) {
    p_.steps.push_back(std::make_unique<Kind>(std::forward<Arguments>(arguments)...));
    return static_cast<Kind&>(*p_.steps.back());
  }

  /// Sub-tiles of one size for a tensor of this shape.
  Geometry even_tiles(const Shape& shape) const { return even_tiles(shape, p_.lanes); }
  /// The layout a window needs of its input, given the input's present one; `out` receives the output's.
  Geometry window_input(const Op& op, Geometry& out) const { return window_input(op, value_of_[size_t(op.in[0])], out); }
  Geometry window_input(const Op& op, int value, Geometry& out) const;
  /// The value itself with a wide enough halo, or a copy in the needed layout.
  int with_window(int value, const Op& op, const Geometry& need);
  /// Would `with_window` copy the value, and is no such copy there yet?
  bool copies(int value, const Geometry& need) const;
  /// The value, or a copy in such sub-tiles.
  int with_tiles(int value, const Geometry& tiles);
  /// The value, or a copy in sub-tiles if it is flat.
  int spatial(int value);
  /// The value, or a flat copy of it.
  int flat(int value);

 private:
  Geometry even_tiles(const Shape& shape, const Lanes& lanes) const;
  int copied(int value, Geometry geometry);
  void quantize(int tensor);

  Program& p_;
  std::map<std::tuple<int, int, int, bool, float>, int> copies_;  // value, sub-tiles (flat: 0 x 0), line, fill -> copy
  std::vector<int> value_of_, bytes_of_;  // by tensor; -1: not there
};

/// Plans an operator that computes with u8; false: it computes with floats, for which its inputs are converted.
bool plan_quantized(Planner& planner, const Op& op);  // ops/plan_quantized.cpp

bool clamps_at_zero(const Activation& act);
/// One pixel, of every other.
bool skips_pixels(const Window& window);

}  // namespace dcil
