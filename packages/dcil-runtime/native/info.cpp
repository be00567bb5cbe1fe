#include "info.h"

#include "operator.h"
#include "stored_op.h"

namespace dcil {

namespace {

std::string number(int64_t value) { return std::to_string(value); }

std::string tensors_json(const std::vector<Port>& ports) {
  std::string all;
  for (const Port& port : ports) {
    std::string sizes;
    for (int64_t side : port.shape) sizes += (sizes.empty() ? "" : ",") + number(side);
    const char* type = port.type == Type::Int64 ? "int64" : "float32";
    all += std::string(all.empty() ? "" : ",") + "{\"shape\":[" + sizes + "],\"dtype\":" + quoted(type) + "}";
  }
  return "[" + all + "]";
}

/// How many weights the layer would have if none were zero.
int64_t weights_of(const Op& op, const Shape& in, const Shape& out) {
  if (op.kind == Kind::Linear) return int64_t(in.c) * out.c;
  return int64_t(in.c / op.groups) * op.window.kh * op.window.kw * out.c;
}

std::string op_json(const Op& op, const Graph& graph) {
  const Shape none, &in = op.in.empty() ? none : graph.shapes()[size_t(op.in[0])], &out = graph.shapes()[size_t(op.out)];
  std::string text = "{\"kind\":" + quoted(operator_of(op.kind).name) + ",\"input\":" + shape_json(in) +
                     ",\"output\":" + shape_json(out) + ",\"activation\":" + quoted(name_of(op.act.kind));
  if (op.kind == Kind::Conv)
    text += ",\"kernel\":[" + number(op.window.kh) + "," + number(op.window.kw) + "],\"stride\":[" +
            number(op.window.sy) + "," + number(op.window.sx) + "],\"groups\":" + number(op.groups);
  if (op.kind == Kind::Conv || op.kind == Kind::Linear)
    text += std::string(",\"dtype\":") + quoted(op.weight_scale.empty() ? "float32" : "int8") + ",\"weights\":" + number(weights_of(op, in, out)) +
            ",\"kept\":" + number(int64_t(op.weight.size()));
  return text + "}";
}

}  // namespace

std::string shape_json(const Shape& s) {
  return "[" + number(s.c) + "," + number(s.h) + "," + number(s.w) + "]";
}

std::string info(const Facts& facts, const Graph& graph) {
  std::string notes, ops;
  for (const auto& [key, value] : facts.notes) notes += (notes.empty() ? "" : ",") + quoted(key) + ":" + quoted(value);
  for (const Op& op : graph.ops()) ops += (ops.empty() ? "" : ",") + op_json(op, graph);
  return "{\"version\":" + number(facts.version) + ",\"bytes\":" + number(int64_t(facts.bytes)) +
         ",\"inputs\":" + tensors_json(facts.inputs) +
         ",\"outputs\":" + tensors_json(facts.outputs) +
         ",\"notes\":{" + notes + "},\"operators\":[" + ops + "]}";
}

}  // namespace dcil
