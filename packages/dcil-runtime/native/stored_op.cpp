#include "stored_op.h"

#include <algorithm>
#include <limits>
#include <set>
#include <utility>

#include "operator.h"

namespace dcil {

namespace {

constexpr int64_t kMaxTensor = 1 << 20, kMaxInputs = 10'000;
const char* const kActNames[] = {"none", "clamp",       "leaky", "silu", "hardswish", "sigmoid",
                                "hardsigmoid", "tanh",  "gelu", "gelu_tanh", "elu",     "sqrt"};
static_assert(std::size(kActNames) == kActs);
const std::pair<const char*, std::vector<float> Op::*> kVectorNames[StoredOp::kVectors] = {
    {"weight_scale", &Op::weight_scale},
    {"bias", &Op::bias},
    {"scale", &Op::scale},
    {"shift", &Op::shift},
    {"twin_scale", &Op::twin_scale},
    {"twin_shift", &Op::twin_shift}};

Kind read_kind(Json& json) {
  const std::string name = json.text();
  int kind = 0;
  while (kind < kKinds && name != operator_of(Kind(kind)).name) kind++;
  require(kind < kKinds, "an unknown operator");
  return Kind(kind);
}

Act read_act(Json& json) {
  const auto found = std::find(std::begin(kActNames), std::end(kActNames), json.text());
  require(found != std::end(kActNames), "an unknown activation");
  return Act(found - std::begin(kActNames));
}

std::vector<int> read_inputs(Json& json) {
  std::vector<int> in;
  json.list([&] {
    require(in.size() < size_t(kMaxInputs), "an operator's inputs");
    in.push_back(int(json.integer(0, kMaxTensor)));
  });
  return in;
}

/// [name, a, b]; null is infinity, below for a and above for b.
Activation read_activation(Json& json) {
  Activation act;
  int place = 0;
  const auto number = [&](double infinity) {
    if (json.null()) return float(infinity);
    const double value = json.real();
    require(value > -1e30 && value < 1e30, "an activation's numbers");
    return float(value);
  };
  json.list([&] {
    constexpr double infinity = std::numeric_limits<double>::infinity();
    require(place < 3, "an unknown activation");
    if (place == 0) act.kind = read_act(json);
    if (place == 1) act.a = number(-infinity);
    if (place == 2) act.b = number(infinity);
    place++;
  });
  require(place == 3, "an unknown activation");
  return act;
}

float read_number(Json& json) {
  const double value = json.real();
  require(value >= 0 && value < 1e30, "an operator's number");
  return float(value);
}

Window read_window(Json& json) {
  int w[10];
  read_numbers(json, 0, 4096, w);
  return {w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], w[8], w[9]};
}

Shape read_shape(Json& json) {
  int s[3];
  read_numbers(json, 1, 1 << 24, s);
  return {s[0], s[1], s[2]};
}

/// Where an array begins, in bytes, and how many elements it has.
struct Place {
  int64_t offset = 0, count = -1;
};

Place read_place(Json& json) {
  int64_t place[2];
  read_numbers(json, 0, int64_t(1) << 40, place);
  return {place[0], place[1]};
}

Span span_of(const Place& place, const Data& data, int size = 4) {
  const int64_t end = place.offset + size * place.count;
  require(place.offset % 4 == 0 && uint64_t(end) <= data.size, "an array outside the file");
  return {data.begin + place.offset, place.count};
}

/// [scale, zero point].
Quant read_quant(Json& json) {
  Quant quant;
  int place = 0;
  json.list([&] {
    require(place < 2, "a list of another length");
    if (place == 0) quant.scale = float(json.real());
    if (place == 1) quant.zero = int(json.integer(0, 255));
    place++;
  });
  require(place == 2 && is_scale(quant.scale), "a scale must be between 1e-20 and 1e20, with a zero point");
  return quant;
}

}  // namespace

const char* name_of(Act act) { return kActNames[int(act)]; }

void StoredOp::read_arrays(Json& json, const Data& data) {
  std::set<std::string> seen;
  Place weights;  // their type depends on what else is there
  json.object([&](const std::string& name) {
    require(seen.insert(name).second, "a field is there twice");
    if (name == "index") return void(index = span_of(read_place(json), data));
    if (name == "weight") return void(weights = read_place(json));
    if (name == "table") return void(table = span_of(read_place(json), data));
    if (name == "tokens") return void(tokens = span_of(read_place(json), data));
    size_t i = 0;
    while (i < size_t(kVectors) && name != kVectorNames[i].first) i++;
    require(i < size_t(kVectors), "an unknown array");
    vectors[i] = span_of(read_place(json), data);
  });
  if (weights.count >= 0) weight = span_of(weights, data, vectors[0].data ? 1 : 4);
  if (vectors[0].data) version = 2;
  require(!index.data || !weight.data || index.count == weight.count, "weights and their positions differ in number");
  int64_t length = -1;
  for (const Span& v : vectors)
    if (v.data) require(length < 0 || v.count == length, "an operator's vectors differ in length"), length = v.count;
}

StoredOp::StoredOp(Json& json, const Data& data) {
  Record record;
  record.field("kind", [&] { op.kind = read_kind(json); });
  record.field("inputs", [&] { op.in = read_inputs(json); });
  record.field("window", [&] { op.window = read_window(json); });
  record.field("groups", [&] { op.groups = int(json.integer(1, 1 << 24)); });
  record.field("count_pad", [&] { op.count_pad = int(json.integer(0, 1)); });
  record.field("residual", [&] { op.residual = int(json.integer(-1, kMaxTensor)); });
  record.field("act", [&] { op.act = read_activation(json); });
  record.field("twin", [&] { op.twin = json.integer(0, 1) ? 0 : -1; });
  record.field("twin_act", [&] { op.twin_act = read_activation(json); });
  const auto quant = [&](Quant& to) { to = read_quant(json), version = 2; };
  record.optional("quant", [&] { quant(op.quant); });
  record.optional("twin_quant", [&] { quant(op.twin_quant); });
  record.field("arrays", [&] { read_arrays(json, data); });
  record.optional("number", [&] { op.number = read_number(json), version = 2; });
  record.optional("shape", [&] { op.shape = read_shape(json); });
  record.read(json);
  if (op.kind > Kind::Linear || op.in.empty() || table.data || tokens.data || op.shape.c || std::max(op.act.kind, op.twin_act.kind) > Act::Hardswish) version = 2;
}

/// An int8 weight becomes the float of the same value.
float StoredOp::weight_at(int64_t i) const {
  if (vectors[0].data) return float(number_at<int8_t>(weight.data + i));
  return number_at<float>(weight.data + 4 * i);
}

/// Kept weights with their positions, whether the file has those or all weights, zeros included.
void StoredOp::copy_weights() {
  if (index.data || !weight.data) {
    op.index = index.copy<uint32_t>();
    op.weight.reserve(size_t(weight.count));
    for (int64_t i = 0; i < weight.count; i++) op.weight.push_back(weight_at(i));
    return;
  }
  require(weight.count < INT32_MAX, "a layer has more than 2^29 weights");
  const auto each = [&](auto&& use) {
    for (int64_t i = 0; i < weight.count; i++) {
      const float value = weight_at(i);
      if (value != 0) use(uint32_t(i), value);
    }
  };
  size_t kept = 0;
  each([&](uint32_t, float) { kept++; });
  op.index.reserve(kept);
  op.weight.reserve(kept);
  each([&](uint32_t i, float value) { op.index.push_back(i), op.weight.push_back(value); });
}

Op StoredOp::unpacked() && {
  copy_weights();
  for (int i = 0; i < kVectors; i++) op.*kVectorNames[i].second = vectors[i].copy<float>();
  op.table = table.copy<float>();
  op.tokens = tokens.copy<uint32_t>();
  return std::move(op);
}

double StoredOp::bytes() const {
  double total = 0, longest = 0;
  for (const Span& v : vectors) total += double(v.count), longest = std::max(longest, double(v.count));
  if (op.kind == Kind::Rows || op.kind == Kind::Columns)  // their outputs have no vectors
    longest = std::max(longest, double(op.kind == Kind::Rows ? op.shape.h : op.shape.w));
  total += double(table.count) + double(tokens.count);
  return 500 + 8.0 * double(std::max(weight.count, index.count)) + 4 * total + 8 * (longest + 1) + 4.0 * double(op.in.size());
}

}  // namespace dcil
