// out = act(scale * a + shift + b), per channel; and plain copies of channels into a larger tensor.
#pragma once
#include "../execute.h"

namespace dcil {

class Map : public Step {
 public:
  /// Writes to the channels of `to` from `channel` on.
  Map(const char* name, const Op& op, std::vector<int> in, int to, bool plain, int channel)
      : Step(name, &op, std::move(in), to), plain_(plain), channel_(channel) {}
  void add_cost(const Program& p, Cost& cost) const override;
  void run(const Member& m) const override;

 private:
  void run_flat(const Member& m) const;

  const bool plain_;  // neither scale nor activation
  const int channel_;
};

}  // namespace dcil
