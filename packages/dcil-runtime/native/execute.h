// Runs the steps of a program on one group of images.
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

/// The plane a convolution's kernel sees: without halos, a 1 x 1 convolution sees one long row.
struct Extent {
  int height, width;
};
Extent extent(const Program& program, const Step& step);

void load_input(const Member& m, const float* images, int count);  // [image][c][h][w]; missing images become zeros
void run_step(const Member& m, const Step& step);
void store_output(const Member& m, float* out, int count);  // member 0 only

}  // namespace dcil
