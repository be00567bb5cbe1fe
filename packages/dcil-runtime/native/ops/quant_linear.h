// A linear layer of int8 weights on a vector of u8; its output is floats.
#pragma once
#include "../execute.h"
#include "quant_conv.h"

namespace dcil {

class QuantLinear final : public Step {
 public:
  QuantLinear(const Op& op, int from, int to) : Step("linear int8", &op, {from}, to) {}
  void add_cost(const Program& p, Cost& cost) const override;
  void build(const Program& p) override;
  void tune(Tuner& tuner) override;
  void run(const Member& m) const override;
  long bytes() const override;
  long scratch_floats(const Program& p) const override;

 private:
  int pitch(const Program& p) const;

  // Dense weights, or kept ones by row.
  std::vector<int8_t> dense_, kept_;
  std::vector<int32_t> start_, column_;
  Requantized requantized_;
};

}  // namespace dcil
