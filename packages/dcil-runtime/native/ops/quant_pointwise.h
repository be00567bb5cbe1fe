// What is done to u8 without sums of products: maps and sums of tensors, concatenation, pooling, the mean.
#pragma once
#include "../execute.h"

namespace dcil {

/// out = act(scale * a + shift + b), per channel; or `a` as it is, to the channels from `channel` on.
class QuantMap final : public Step {
 public:
  QuantMap(const char* name, const Op& op, int from, int to, int channel = 0)
      : Step(name, &op, {from}, to), channel_(channel) {}
  void add_cost(const Program& p, Cost& cost) const override;
  void build(const Program& p) override;
  void run(const Member& m) const override;
  long bytes() const override { return long(scale_.size() + offset_.size()) * 4; }

 private:
  bool copies() const { return op->kind == Kind::Concat; }

  const int channel_;
  std::vector<float> scale_, offset_;
  float residual_scale_ = 0;
};

/// The maximum over a sliding window.
class QuantPool final : public Step {
 public:
  QuantPool(const Op& op, int from, int to) : Step("pool int8", &op, {from}, to) {}
  void add_cost(const Program& p, Cost& cost) const override;
  void build(const Program& p) override;
  void run(const Member& m) const override;
  long bytes() const override { return long(distances_.size()) * 4; }

 private:
  std::vector<int32_t> distances_;
};

/// The mean over the pixels, as floats.
class QuantMean final : public Step {
 public:
  QuantMean(const Op& op, int from, int to) : Step("mean int8", &op, {from}, to) {}
  void add_cost(const Program& p, Cost& cost) const override;
  void run(const Member& m) const override;
};

}  // namespace dcil
