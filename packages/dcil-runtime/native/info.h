// What is in a plan, as JSON.
#pragma once
#include "plan_file.h"

namespace dcil {

std::string info(const Facts& facts, const Graph& graph);

/// [c,h,w], or [c] for a rank of 2.
std::string shape_json(const Shape& shape, int rank = 4);

}  // namespace dcil
