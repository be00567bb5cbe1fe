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
  bool halves(const Program& p) const;
  void build_order(const Program& p);

  std::vector<int32_t> table_;  // see gather_table; each vector's entries in the order of its sums
  Aligned<uint8_t> order_;      // or that of quantize_tiles
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
  /// Takes every `sy`-th row and `sx`-th column.
  GatherBytes(int from, int to, int sy = 1, int sx = 1) : Step("gather int8", nullptr, {from}, to), sy_(sy), sx_(sx) {}
  void add_cost(const Program& p, Cost& cost) const override;
  void build(const Program& p) override;
  void run(const Member& m) const override;
  long bytes() const override { return long(table_.size()) * 4; }

 private:
  const int sy_, sx_;
  std::vector<int32_t> table_;
};

Store store_of(const Quant& quant);
/// As `exchange` (execute.h), for u8.
void exchange_bytes(const Member& m, int value, const int32_t* channels, int first, int count, Range rows);
void exchange_bytes(const Member& m, int value, Range channels);

}  // namespace dcil
