// Copies into another layout: other sub-tiles, a wider halo, or flat.
#pragma once
#include "../execute.h"

namespace dcil {

class Gather final : public Step {
 public:
  /// Takes every `sy`-th row and `sx`-th column.
  Gather(int from, int to, int sy = 1, int sx = 1) : Step("gather", nullptr, {from}, to), sy_(sy), sx_(sx) {}
  void add_cost(const Program& p, Cost& cost) const override;
  void build(const Program& p) override;
  void run(const Member& m) const override;
  long bytes() const override { return long(table_.size()) * 4; }

 private:
  const int sy_, sx_;
  std::vector<int32_t> table_;  // see gather_table
};

class Flatten final : public Step {
 public:
  Flatten(int from, int to) : Step("flatten", nullptr, {from}, to) {}
  void add_cost(const Program& p, Cost& cost) const override;
  void run(const Member& m) const override;
};

}  // namespace dcil
