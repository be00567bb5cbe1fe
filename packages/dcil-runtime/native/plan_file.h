// The reader of plan files, for every language: what it accepts is a network whose every number was checked.
//
//   magic "DCILPLAN" · version · 0 · length of META · length of DATA · SHA-256 of META and DATA · META · DATA
//
// META is JSON: the input's shape and the operators, each naming tensors by number (0 is the input; every operator's
// output, and its twin if it has one, takes the next number) and arrays as [offset, count] into DATA. Instead of one
// shape there may be lists of inputs (tensors 0, 1, ...) and outputs. Little-endian.
#pragma once
#include <string>
#include <utility>
#include <vector>

#include "graph.h"

namespace dcil {

constexpr uint32_t kNewestVersion = 2;

/// An input or output as its caller sees it, without the batch.
struct Port {
  std::vector<int64_t> shape;
  Type type = Type::Float32;
};

/// What a file says besides its network.
struct Facts {
  uint32_t version;
  size_t bytes;                 // of the whole file
  std::vector<Port> inputs, outputs;
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
