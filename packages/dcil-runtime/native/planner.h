// Decides how every tensor lies, operator by operator, and inserts copies where a consumer needs another layout.
#pragma once
#include <map>
#include <tuple>

#include "program.h"

namespace dcil {

class Planner {
 public:
  explicit Planner(Program& program) : p_(program) {}
  void plan();

 private:
  void conv(const Op& op);
  void pool(const Op& op);
  void map(const Op& op);
  void concat(const Op& op);
  void to_flat(const Op& op);
  void linear(const Op& op);

  Geometry window_input(const Op& op, Geometry& out) const;
  int with_window(int value, const Op& op, const Geometry& need);
  int with_tiles(int value, const Geometry& tiles);
  int copied(int value, Geometry geometry);
  int spatial(int value);
  int flat(int value);
  int add_value(Shape shape, Geometry geometry, bool nonnegative);
  Geometry even_tiles(const Shape& shape) const;
  Step& add_step(Work work, const Op* op, std::vector<int> in, int out);

  Program& p_;
  std::map<std::tuple<int, int, int, float>, int> copies_;  // value, height and width of sub-tiles, fill -> copy
  std::vector<int> value_of_;  // tensor of the graph -> its value
};

}  // namespace dcil
