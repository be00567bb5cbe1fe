#include "quant_linear.h"

#include <algorithm>
#include <cstring>

#include "../cost.h"
#include "../tune.h"

namespace dcil {

/// Inputs of one image, rounded up to whole vectors.
int QuantLinear::pitch(const Program& p) const { return (p.values[size_t(in[0])].shape.c + 63) / 64 * 64; }

long QuantLinear::scratch_floats(const Program& p) const { return long(p.lanes.images) * pitch(p) / 4; }

void QuantLinear::add_cost(const Program& p, Cost& cost) const {
  const double outputs = p.values[size_t(out)].shape.c, dense = double(pitch(p)) * outputs;
  const double kept = 5 * double(op->weight.size()) + 20 * outputs;
  cost.tables += std::max(dense, kept);
  cost.passing = std::max(cost.passing, dense + 2 * kept);
  cost.work += dense * p.lanes.images;
}

void QuantLinear::build(const Program& p) {
  requantized_.build(*op, p.values[size_t(in[0])].quant, {1, 0}, {}, p.kernels.quant->byte_offset);
  const size_t inputs = size_t(p.values[size_t(in[0])].shape.c);
  for (int64_t s : op->start) start_.push_back(int32_t(s));
  for (uint32_t i : op->index) column_.push_back(int32_t(i % inputs));
  for (float w : op->weight) kept_.push_back(int8_t(w));
}

/// Dense rows or kept weights only, whichever is faster.
void QuantLinear::tune(Tuner& tuner) {
  const size_t inputs = size_t(tuner.program().values[size_t(in[0])].shape.c), row = size_t(pitch(tuner.program()));
  const double kept = tuner.measure(*this, 3);
  dense_.assign(op->bias.size() * row, 0);
  for (size_t i = 0; i < op->index.size(); i++)
    dense_[op->index[i] / inputs * row + op->index[i] % inputs] = int8_t(op->weight[i]);
  if (tuner.measure(*this, 3) < kept) {
    start_ = column_ = {};
    kept_ = {};
  } else {
    dense_ = {};
  }
}

void QuantLinear::run(const Member& m) const {
  QuantLinearArgs a{};
  a.inputs = m.program.values[size_t(in[0])].shape.c;
  a.outputs = m.program.values[size_t(out)].shape.c;
  a.images = m.program.lanes.images;
  a.pitch = pitch(m.program);
  uint8_t* own_copy = reinterpret_cast<uint8_t*>(m.scratch);  // every row of whole vectors
  std::memset(own_copy, 0, size_t(a.images) * size_t(a.pitch));
  for (long n = 0; n < a.images; n++)
    std::memcpy(own_copy + n * a.pitch, m.arena.bytes(in[0]) + n * a.inputs, size_t(a.inputs));
  a.in = own_copy;
  a.dense = dense_.empty() ? nullptr : dense_.data();
  a.start = start_.data();
  a.column = column_.data();
  a.weight = kept_.data();
  a.first = requantized_.first.data();
  a.scale = requantized_.scale.data();
  a.offset = requantized_.offset.data();
  a.out = m.arena.value(out);
  const Range own = share(a.outputs, m);
  a.o0 = own.begin;
  a.o1 = own.end;
  m.program.kernels.quant->linear(a);
  if (residual < 0 && op->act.kind == Act::None) return;
  for (int n = 0; n < a.images; n++) {  // the activation through a layer without inputs
    LinearArgs one{};
    float* row = a.out + long(n) * a.outputs;
    one.in = one.dense = one.bias = one.out = row;
    one.residual = residual < 0 ? nullptr : m.arena.value(residual) + long(n) * a.outputs;
    one.images = 1;
    one.outputs = a.outputs;
    one.o0 = own.begin;
    one.o1 = own.end;
    one.act = op->act;
    m.program.kernels.linear(one);
  }
}

long QuantLinear::bytes() const {
  return long(dense_.size() + kept_.size() + 4 * (start_.size() + column_.size())) + requantized_.bytes();
}

}  // namespace dcil
