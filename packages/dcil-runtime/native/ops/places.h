// Where the pixels of a value lie, for steps that take numbers one by one and in any order.
#pragma once
#include "../execute.h"

namespace dcil {

struct Cost;

/// Channel c of image n has its pixel p at floats[c * plane + n * image + at[p]].
class Places {
 public:
  void build(const Layout& layout);
  static double bytes(const Layout& layout);
  long bytes() const { return long(at.size() + outside_.size()) * 4; }
  /// Zeros where a sub-tile holds no pixel, in some channels.
  void clear(float* floats, Range channels) const;

  long plane = 1, image = 0;
  std::vector<int32_t> at;

 private:
  std::vector<int32_t> outside_;
};

}  // namespace dcil
