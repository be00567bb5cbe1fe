// The sparse convolution of u8 by int8 weights as a step.
#pragma once
#include "../execute.h"
#include "../quant_pack.h"

namespace dcil {

/// The numbers that a finished sum of each channel is multiplied by and shifted with (QuantFinish).
struct Requantized {
  std::vector<float> scale, offset;
  std::vector<int32_t> first;  // minus the zero point times the channel's weights
  float residual_scale = 0;
  bool wild = false;  // may a number before rounding be 2^31 or more?

  void build(const Op& op, const Quant& in, const Quant& out, const Quant& residual, int byte_offset);
  long bytes() const { return long(scale.size() + offset.size() + first.size()) * 4; }
};

class QuantConv final : public Step {
 public:
  QuantConv(const Op& op, int from, int to, const Window& window)
      : Step("conv int8", &op, {from}, to), window(window) {}
  void settle(const Program& p) override;
  void add_cost(const Program& p, Cost& cost) const override;
  void build(const Program& p) override;
  void tune(Tuner& tuner) override;  // ops/tune_quant_conv.cpp
  bool searches() const override { return true; }
  void unshare(const Program& p) override;
  void run(const Member& m) const override;
  long bytes() const override { return packed.bytes() + requantized_.bytes(); }
  int replaceable() const override { return residual == in[0] ? -1 : residual; }
  std::string choice(const Program& p) const override;
  long macs(const Program& p) const override;

  const Window window;   // the operator's, or one whose strides were taken out of the input
  bool one_row = false;  // as Conv's
  QuantChoice chosen;
  PackedGroups packed;

 private:
  QuantConvArgs arguments(const Member& m) const;
  const QuantTile& tile(const Member& m) const;

  Requantized requantized_;
};

/// QuantFinish for the output of an operator, but for what its sums are multiplied by.
QuantFinish finish_of(const Member& m, const Step& step);
/// Forgets an activation that only clamps, and returns its ends in `store`.
Activation clamped_store(const Activation& act, const Quant& quant, Store& store);

}  // namespace dcil
