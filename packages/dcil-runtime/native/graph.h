// The network as the plan file states it: tensors of one image and the operators between them, checked as they come.
#pragma once
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "error.h"
#include "kernels.h"
#include "quant.h"

namespace dcil {

struct Shape {
  int c = 0, h = 0, w = 0;
  long size() const { return long(c) * h * w; }
  bool operator==(const Shape& o) const { return c == o.c && h == o.h && w == o.w; }
};

enum class Kind : int32_t {
  Conv, MaxPool, AvgPool, Map, Concat, Mean, Flatten, Linear, Add, Sub, Mul, Div, LayerNorm, GroupNorm, Select,
  Take, Constant, Embedding, Rows, Columns, Attention
};
constexpr int kKinds = 21;

/// Of the numbers of an input; whole ones are floats as soon as they are read.
enum class Type : int32_t { Float32, Int64 };
constexpr int64_t kMostWhole = 1 << 24;  // every whole number up to here is a float

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
  float number = 0;         // norms: what is added to a variance
  Activation act, twin_act;
  std::vector<int64_t> start;   // Conv, Linear: where each output channel's kept weights begin
  std::vector<uint32_t> index;  // position in [out][in / groups][kh][kw], ascending; Select: channels of all inputs
  std::vector<float> weight, bias, scale, shift, twin_scale, twin_shift;
  Shape shape;                      // of the output, where it does not follow; Attention: see ops/attention.cpp
  std::vector<float> table;         // constants: numbers, embeddings, what is added to an attention's scores
  std::vector<uint32_t> tokens;     // Attention: pixels
  std::vector<float> weight_scale;  // int8 weights: `weight` holds whole numbers; one scale per output channel
  Quant quant, twin_quant;          // of the output and the twin
};

/// What a plan from anybody may ask for.
struct Limits {
  double memory = HUGE_VAL;  // bytes: weights, tables and the buffers of one call
  double work = HUGE_VAL;    // multiply-adds, or operations that take about as long, for one image
};

class Graph {
 public:
  explicit Graph(Shape input, Limits limits = {}, Type type = Type::Float32);
  /// Adds a further input, before any operator; throws Error.
  int add_input(Shape shape, Type type);
  /// Says which tensors are the outputs, after all operators; throws Error.
  void set_outputs(std::vector<int> tensors);
  /// Counts the memory of operators that are about to be copied in; throws Error beyond the limit.
  void claim(double bytes);
  /// Checks the operator against the tensors so far and appends its output (and twin); throws Error.
  int add(Op op);
  const std::vector<Shape>& shapes() const { return shapes_; }
  const std::vector<Op>& ops() const { return ops_; }
  /// How a tensor is stored: as u8, or as it is.
  const Quant& quant(int tensor) const { return quants_[size_t(tensor)]; }
  const Limits& limits() const { return limits_; }
  double bytes() const { return bytes_; }
  int inputs() const { return int(types_.size()); }
  Type type(int input) const { return types_[size_t(input)]; }
  /// Whole numbers of an input must be below this and not negative, because an embedding reads them; 0: need not.
  int64_t below(int input) const { return below_[size_t(input)]; }
  const std::vector<int>& outputs() const { return outputs_; }

 private:
  void check_fused(const Op& op, const Shape& out) const;
  void limit_numbers(const Op& op);
  int append(Shape shape, const Quant& quant = {});

  std::vector<Shape> shapes_;
  std::vector<Quant> quants_;
  std::vector<Op> ops_;
  std::vector<Type> types_;
  std::vector<int64_t> below_;
  std::vector<int> outputs_{0};
  Limits limits_;
  double bytes_ = 0;
  long operands_ = 0;
};

/// Throws Error that names the limit, what is asked for and how to raise it.
void require_memory(double bytes, const Limits& limits);
void require_work(double work, const Limits& limits);

}  // namespace dcil
