// What a planned program will take, from its shapes alone: known before anything is allocated for it.
#pragma once
#include "program.h"

namespace dcil {

/// Doubles, because they do not overflow.
struct Cost {
  double tables = 0;   // bytes: tables and packed weights, kept
  double passing = 0;  // bytes: the most that building and tuning hold at a time besides
  double buffers = 0;  // bytes: one call
  double work = 0;     // multiply-adds, or what takes about as long, for one group of images

  double kept() const { return tables + buffers; }
  double peak() const { return tables + passing + buffers; }
};

Cost cost_of(const Program& program);

/// Entries of the table that gathers a plane (gather_table).
double table_entries(const Layout& layout);

}  // namespace dcil
