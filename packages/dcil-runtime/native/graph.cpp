#include "graph.h"

#include <algorithm>
#include <cstdio>

#include "operator.h"

namespace dcil {

namespace {

constexpr long kMaxSide = 1 << 16, kMaxValues = 1L << 28, kMaxWeights = 1L << 29;
constexpr size_t kMaxTensors = 1 << 13;  // placing them takes the square of their number
constexpr long kMaxOperands = 1 << 16;
constexpr double kGiB = 1L << 30;

void check_shape(const Shape& s) {
  require(s.c >= 1 && s.h >= 1 && s.w >= 1, "a tensor has no elements");
  require(s.h <= kMaxSide && s.w <= kMaxSide && s.c <= (1 << 24), "a tensor is larger than 65536 x 65536");
  require(long(s.h) * s.w <= kMaxValues && s.size() <= kMaxValues, "a tensor has more than 2^28 values");
}

void check_window(const Window& w) {
  const int positive[] = {w.kh, w.kw, w.sy, w.sx, w.dy, w.dx};
  const int padding[] = {w.top, w.left, w.bottom, w.right};
  for (int v : positive) require(v >= 1 && v <= 4096, "a window, stride or dilation is not between 1 and 4096");
  for (int v : padding) require(v >= 0 && v <= 4096, "a padding is not between 0 and 4096");
}

int slide(int size, int before, int after, int kernel, int stride, int dilation) {
  const long room = long(size) + before + after - long(kernel - 1) * dilation - 1;
  require(room >= 0, "a window is larger than its padded input");
  return int(room / stride) + 1;
}

void check_activation(const Activation& act) {
  const int kind = int(act.kind);
  require(kind >= 0 && kind < kActs, "an unknown activation");
}

}  // namespace

Shape slide(const Shape& in, int channels, const Window& w) {
  check_window(w);
  return {channels, slide(in.h, w.top, w.bottom, w.kh, w.sy, w.dy), slide(in.w, w.left, w.right, w.kw, w.sx, w.dx)};
}

void require_memory(double bytes, const Limits& limits) {
  if (bytes <= limits.memory) return;
  char text[200];
  std::snprintf(text, sizeof text, "it asks for %.4g GiB of memory, more than the limit of %.4g GiB (raise max_memory to allow it)",
                bytes / kGiB, limits.memory / kGiB);
  throw Error(text);
}

void require_work(double work, const Limits& limits) {
  if (work <= limits.work) return;
  char text[200];
  std::snprintf(text, sizeof text, "one image takes %.3g multiply-adds, more than the limit of %.3g (raise max_work to allow it)",
                work, limits.work);
  throw Error(text);
}

Graph::Graph(Shape input, Limits limits, Type type) : limits_(limits) { add_input(input, type); }

int Graph::add_input(Shape shape, Type type) {
  require(ops_.empty(), "an input comes after an operator");
  require(type == Type::Float32 || (shape.h == 1 && shape.w == 1), "an input of whole numbers is not a vector");
  types_.push_back(type);
  below_.push_back(0);
  return append(shape);
}

void Graph::set_outputs(std::vector<int> tensors) {
  require(!tensors.empty() && tensors.size() <= 1024, "a network has no output, or more than 1024");
  for (int t : tensors) require(t >= 0 && t < int(shapes_.size()), "an output is a tensor that does not exist");
  outputs_ = std::move(tensors);
}

void Graph::claim(double bytes) {
  require_memory(bytes_ + bytes, limits_);
  bytes_ += bytes;
}

int Graph::append(Shape shape, const Quant& quant) {
  check_shape(shape);
  require(shapes_.size() < kMaxTensors, "more than 8192 tensors");
  shapes_.push_back(shape);
  quants_.push_back(quant);
  return int(shapes_.size()) - 1;
}

int Graph::add(Op op) {
  require(int(op.kind) >= 0 && int(op.kind) < kKinds, "an unknown operator");
  operands_ += long(op.in.size());
  require(operands_ <= kMaxOperands, "the operators have more than 65536 inputs");
  for (int t : op.in) require(t >= 0 && t < int(shapes_.size()), "an operator reads a tensor that does not exist yet");
  const Operator& kind = operator_of(op.kind);
  require(int(op.in.size()) >= kind.least && int(op.in.size()) <= kind.most, "an operator has too many or too few inputs");
  check_activation(op.act);
  check_activation(op.twin_act);
  std::vector<Shape> in;
  for (int t : op.in) in.push_back(shapes_[t]);
  const Shape out = kind.shape(op, in);
  check_shape(out);
  check_fused(op, out);
  const auto quant_of = [&](int tensor) { return tensor < 0 ? Quant{} : quants_[size_t(tensor)]; };
  if (!op.weight_scale.empty())
    check_quantized_weights(op, quant_of(op.in.empty() ? -1 : op.in[0]), quant_of(op.residual));
  op.out = append(out, op.quant);
  if (op.twin >= 0) op.twin = append(out, op.twin_quant);
  if (op.kind == Kind::Embedding) limit_numbers(op);
  ops_.push_back(std::move(op));
  outputs_ = {ops_.back().out};
  return ops_.back().out;
}

/// The rows of an embedding bound the numbers that choose them.
void Graph::limit_numbers(const Op& op) {
  const int input = op.in[0];
  require(input < inputs() && type(input) == Type::Int64, "an embedding reads something else than an input of whole numbers");
  const int64_t rows = int64_t(op.table.size()) / op.shape.c;
  int64_t& below = below_[size_t(input)];
  below = below ? std::min(below, rows) : rows;
}

/// Every position once, ascending and inside the weight tensor; fills op.start.
void check_weights(Op& op, int outputs, long per_output) {
  require(outputs > 0, "a tensor has no elements");
  require(per_output < kMaxWeights / outputs, "a layer has more than 2^29 weights");
  require(op.index.size() == op.weight.size(), "weights and their positions differ in number");
  op.start.assign(outputs + 1, 0);
  long before = -1;
  for (uint32_t i : op.index) {
    require(long(i) > before && long(i) < per_output * outputs, "a weight's position is out of order or out of range");
    before = i;
    op.start[i / per_output + 1]++;
  }
  for (int o = 0; o < outputs; o++) op.start[o + 1] += op.start[o];
}

void Graph::check_fused(const Op& op, const Shape& out) const {
  const Operator& kind = operator_of(op.kind);
  const size_t c = size_t(out.c);
  require(op.residual < int(shapes_.size()), "a residual reads a tensor that does not exist yet");
  require(op.residual < 0 || (kind.residual && shapes_[op.residual] == out), "a residual differs in shape");
  require(op.twin >= 0 || !op.twin_quant, "a twin's scale without a twin");
  require(op.twin < 0 || kind.twin, "only a convolution can have a twin");
  require(op.twin < 0 || (op.twin_scale.size() == c && op.twin_shift.size() == c), "a twin's scale has another length");
}

}  // namespace dcil
