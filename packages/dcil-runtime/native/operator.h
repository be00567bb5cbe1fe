// The kinds of operators: what the graph, the reader and the planner ask about each. Each has a file in ops/ and a line
// in operators.cpp; its steps (step.h) answer for the rest.
#pragma once
#include "graph.h"

namespace dcil {

class Planner;

struct Operator {
  const char* name;  // in the plan file
  int least, most;   // inputs
  bool residual, twin;  // may it have one?
  /// Checks the operator against its inputs and returns its output's shape; throws Error.
  Shape (*shape)(Op& op, const std::vector<Shape>& in);
  /// Decides how the output lies and adds the steps that compute it.
  void (*plan)(Planner& planner, const Op& op);
};

const Operator& operator_of(Kind kind);

/// Every position once, ascending and inside the weight tensor; fills op.start.
void check_weights(Op& op, int outputs, long per_output);
/// The output of a sliding window.
Shape slide(const Shape& in, int channels, const Window& window);

}  // namespace dcil
