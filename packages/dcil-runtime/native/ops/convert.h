// From floats to u8 and back, and copies of u8 into another layout.
#pragma once
#include "../execute.h"

namespace dcil {

class Quantize final : public Step {
 public:
  Quantize(int from, int to) : Step("quantize", nullptr, {from}, to) {}
  void add_cost(const Program& p, Cost& cost) const override;
  void build(const Program& p) override;
  void run(const Member& m) const override;
  long bytes() const override { return long(table_.size()) * 4; }

 private:
  void run_flat(const Member& m) const;

  std::vector<int32_t> table_;  // see gather_table; each vector's entries in the order of its sums
};

class Dequantize final : public Step {
 public:
  Dequantize(int from, int to) : Step("dequantize", nullptr, {from}, to) {}
  void add_cost(const Program& p, Cost& cost) const override;
  void build(const Program& p) override;
  void run(const Member& m) const override;
  long bytes() const override { return long(table_.size()) * 4; }

 private:
  std::vector<int32_t> table_;
};

class GatherBytes final : public Step {
 public:
  GatherBytes(int from, int to) : Step("gather", nullptr, {from}, to) {}
  void add_cost(const Program& p, Cost& cost) const override;
  void build(const Program& p) override;
  void run(const Member& m) const override;
  long bytes() const override { return long(table_.size()) * 4; }

 private:
  std::vector<int32_t> table_;
};

Store store_of(const Quant& quant);
/// As `exchange` (execute.h), for u8.
void exchange_bytes(const Member& m, int value, const int32_t* channels, int first, int count, Range rows);
void exchange_bytes(const Member& m, int value, Range channels);

}  // namespace dcil
