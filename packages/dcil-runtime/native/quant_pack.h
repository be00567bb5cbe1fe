// Kept int8 weights as the groups of four inputs that a kernel streams (Groups in quant_kernels.h).
#pragma once
#include "layout.h"
#include "pack.h"

namespace dcil {

struct QuantChoice {
  int tile = 0;
  Split split = Split::None;
};

struct PackedGroups {
  std::vector<int32_t> channel, start, stream;
  std::vector<int> parts;  // thread p computes entries parts[p] to parts[p + 1]
  long bytes() const { return long(channel.size() + start.size() + stream.size()) * 4; }
};

/// For kernels that compute `width` output channels at a time, dealt to `parts` threads.
PackedGroups pack_groups(const Op& op, const Layout& in, int width, int parts);

}  // namespace dcil
