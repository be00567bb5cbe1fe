// The sparse convolution as a step: which kernel computes it, with which weights, and which part of it a thread has.
#pragma once
#include "../execute.h"
#include "../pack.h"

namespace dcil {

/// The plane a convolution's kernel sees: without halos, a 1 x 1 convolution sees one long row.
struct Extent {
  int height, width;
};

class Conv final : public Step {
 public:
  /// The window is the operator's, but moves one pixel at a time over an input of which the others were left out.
  Conv(const Op& op, int from, int to, const Window& window) : Step("conv", &op, {from}, to), window(window) {}
  void settle(const Program& p) override;
  void add_cost(const Program& p, Cost& cost) const override;
  void tune(Tuner& tuner) override;  // ops/tune_conv.cpp
  bool searches() const override { return true; }
  void unshare(const Program& p) override;
  void run(const Member& m) const override;
  long bytes() const override { return packed.bytes(); }
  long scratch_floats(const Program& p) const override;
  int replaceable() const override { return residual == in[0] ? -1 : residual; }
  std::string choice(const Program& p) const override;
  long macs(const Program& p) const override;

  Extent extent(const Program& p) const;

  const Window window;
  bool one_row = false;  // nothing has a halo and the window is one pixel: the plane is one long row
  Choice chosen;
  Packed packed;

 private:
  ConvArgs arguments(const Member& m) const;
  Range split_rows(const Member& m, int height) const;
  const Tile& tile(const Member& m) const;
  template <class Entry>
  Range entries(const Member& m, const Stream<Entry>& stream) const;
  void run_blocks(const Member& m, ConvArgs& a) const;
  template <class Entry>
  void exchange_own(const Member& m, const Stream<Entry>& stream, int width, Range rows) const;
};

}  // namespace dcil
