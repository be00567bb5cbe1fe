// What a step can compute once from its layouts: gather tables, pool windows, the rows of linear layers.
#pragma once
#include "program.h"

namespace dcil {

void fill_tables(const Program& program, Step& step);

}  // namespace dcil
