#include "info.h"

#include "operator.h"
#include "stored_op.h"

namespace dcil {

namespace {

std::string number(int64_t value) { return std::to_string(value); }

std::string tensors_json(const Shape& shape, int rank) {
  return "[{\"shape\":" + shape_json(shape, rank) + ",\"dtype\":\"float32\"}]";
}

/// How many weights the layer would have if none were zero.
int64_t weights_of(const Op& op, const Shape& in, const Shape& out) {
  if (op.kind == Kind::Linear) return int64_t(in.c) * out.c;
  return int64_t(in.c / op.groups) * op.window.kh * op.window.kw * out.c;
}

std::string op_json(const Op& op, const Graph& graph) {
  const Shape &in = graph.shapes()[size_t(op.in[0])], &out = graph.shapes()[size_t(op.out)];
  std::string text = "{\"kind\":" + quoted(operator_of(op.kind).name) + ",\"input\":" + shape_json(in) +
                     ",\"output\":" + shape_json(out) + ",\"activation\":" + quoted(name_of(op.act.kind));
  if (op.kind == Kind::Conv)
    text += ",\"kernel\":[" + number(op.window.kh) + "," + number(op.window.kw) + "],\"stride\":[" +
            number(op.window.sy) + "," + number(op.window.sx) + "],\"groups\":" + number(op.groups);
  if (op.kind == Kind::Conv || op.kind == Kind::Linear)
    text += ",\"dtype\":\"float32\",\"weights\":" + number(weights_of(op, in, out)) +
            ",\"kept\":" + number(int64_t(op.weight.size()));
  return text + "}";
}

}  // namespace

std::string shape_json(const Shape& s, int rank) {
  return rank == 2 ? "[" + number(s.c) + "]" : "[" + number(s.c) + "," + number(s.h) + "," + number(s.w) + "]";
}

std::string info(const Facts& facts, const Graph& graph) {
  std::string notes, ops;
  for (const auto& [key, value] : facts.notes) notes += (notes.empty() ? "" : ",") + quoted(key) + ":" + quoted(value);
  for (const Op& op : graph.ops()) ops += (ops.empty() ? "" : ",") + op_json(op, graph);
  return "{\"version\":" + number(facts.version) + ",\"bytes\":" + number(int64_t(facts.bytes)) +
         ",\"inputs\":" + tensors_json(graph.shapes()[0], facts.input_rank) +
         ",\"outputs\":" + tensors_json(graph.shapes()[size_t(graph.output())], facts.output_rank) +
         ",\"notes\":{" + notes + "},\"operators\":[" + ops + "]}";
}

}  // namespace dcil
