// One member's work on one group of images, and what the steps of ops/ share.
#pragma once
#include "program.h"
#include "team.h"

namespace dcil {

/// One member of a team that works on one arena together; alone: member 0 of 1.
struct Member {
  const Program& program;
  const Arena& arena;
  float* scratch;
  int part, parts;
};

struct Range {
  int begin, end;
};
/// What one of several parts gets of `count` rows, channels, ...
inline Range share(int count, int part, int parts) {
  return {int(long(count) * part / parts), int(long(count) * (part + 1) / parts)};
}
inline Range share(int count, const Member& m) { return share(count, m.part, m.parts); }

inline const Layout& layout(const Member& m, int value) { return *m.program.values[size_t(value)].layout; }

/// Fills the halos of some channels (null: first, first + 1, ...) from rows [y0, y1) of their inner part.
void exchange(const Member& m, int value, const int32_t* channels, int first, int count, Range rows);
void exchange(const Member& m, int value, Range channels);
/// Some channels of a value, each from its own `step` floats further on, by a table that serves all of them.
void gather_channels(const Member& m, int value, Range own, const float* from, long step,
                     const std::vector<int32_t>& table, int32_t limit);
/// Some channels of `count` images as [image][c][h][w].
void copy_images(const Member& m, int value, int count, Range channels, float* to);

/// Of every input `count` images from the `first` on, [image][c][h][w]; missing images become zeros.
void load_inputs(const Member& m, const void* const* in, long first, int count);
void store_outputs(const Member& m, void* const* out, long first, int count);  // member 0 only

}  // namespace dcil
