// The network as the plan file states it: tensors of one image and the operators between them, checked as they come.
#pragma once
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"

namespace dcil {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Shape {
  int c = 0, h = 0, w = 0;
  long size() const { return long(c) * h * w; }
  bool operator==(const Shape& o) const { return c == o.c && h == o.h && w == o.w; }
};

enum class Kind : int32_t { Conv, MaxPool, AvgPool, Map, Concat, Mean, Flatten, Linear };
constexpr int kKinds = 8;

/// A sliding window. `bottom` and `right` padding may exceed `top` and `left`.
struct Window {
  int kh = 1, kw = 1, sy = 1, sx = 1, top = 0, left = 0, bottom = 0, right = 0, dy = 1, dx = 1;
};

struct Op {
  Kind kind;
  std::vector<int> in;  // tensors; Map: one or two
  int out = -1, residual = -1, twin = -1;
  Window window;
  int groups = 1;
  int count_pad = 0;        // AvgPool: padding counts in the divisor up to this far below and right of the image
  Activation act, twin_act;
  std::vector<int64_t> start;   // Conv, Linear: where each output channel's kept weights begin
  std::vector<uint32_t> index;  // position in [out][in / groups][kh][kw], ascending
  std::vector<float> weight, bias, scale, shift, twin_scale, twin_shift;
};

class Graph {
 public:
  explicit Graph(Shape input);
  /// Checks the operator against the tensors so far and appends its output (and twin); throws Error.
  int add(Op op);
  const std::vector<Shape>& shapes() const { return shapes_; }
  const std::vector<Op>& ops() const { return ops_; }
  int output() const { return ops_.empty() ? 0 : ops_.back().out; }

 private:
  Shape shape_of(const Op& op) const;
  void check_weights(Op& op, int outputs, long per_output) const;
  void check_extras(const Op& op, const Shape& out) const;
  int append(Shape shape);

  std::vector<Shape> shapes_;
  std::vector<Op> ops_;
};

}  // namespace dcil
