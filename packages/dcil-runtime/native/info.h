// What is in a plan, as JSON.
#pragma once
#include "plan_file.h"

namespace dcil {

std::string info(const Facts& facts, const Graph& graph);

/// [c,h,w].
std::string shape_json(const Shape& shape);

}  // namespace dcil
