// The reader of plan files, for every language: what it accepts is a network whose every number was checked.
//
//   magic "DCILPLAN" · version · 0 · length of META · length of DATA · SHA-256 of META and DATA · META · DATA
//
// META is JSON: the input's shape and the operators, each naming tensors by number (0 is the input; every operator's
// output, and its twin if it has one, takes the next number) and arrays as [offset, count] into DATA. Little-endian.
#pragma once
#include <string>
#include <utility>
#include <vector>

#include "graph.h"

namespace dcil {

constexpr uint32_t kNewestVersion = 2;

/// What a file says besides its network.
struct Facts {
  uint32_t version;
  size_t bytes;                 // of the whole file
  int input_rank, output_rank;  // 4 for images, 2 for vectors
  std::vector<std::pair<std::string, std::string>> notes;
};

struct PlanFile {
  Facts facts;
  Graph graph;
};

/// Throws Error where the bytes are no plan or ask for more than the limits allow.
PlanFile parse_plan(const uint8_t* bytes, size_t size, const Limits& limits);

/// The content of a regular file of at most so many bytes; throws Error, or std::system_error where it cannot be read.
std::vector<uint8_t> content_of(const char* file, double most);

}  // namespace dcil
