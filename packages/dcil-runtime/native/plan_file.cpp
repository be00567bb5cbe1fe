#include "plan_file.h"

#include <cstring>
#include <set>

#include "json.h"
#include "operator.h"
#include "sha256.h"
#include "stored_op.h"

namespace dcil {

namespace {

constexpr size_t kHeader = 64;
constexpr size_t kMaxMeta = 16 << 20;  // far above what the operators allowed can take

/// META, before any of DATA is copied.
struct Meta {
  int input[3] = {}, ranks[2] = {};      // of one input and one output of floats,
  std::vector<Port> inputs, outputs;    // or of any
  std::vector<int> tensors;             // that are the outputs
  std::vector<std::pair<std::string, std::string>> notes;
  std::vector<StoredOp> ops;
};

void read_notes(Json& json, Meta& meta) {
  std::set<std::string> seen;
  try {
    json.object([&](const std::string& key) {
      require(seen.insert(key).second, "a field is there twice");
      meta.notes.push_back({key, json.text()});
    });
  } catch (const Error& error) {
    throw Error(std::string("its notes: ") + error.what());
  }
}

/// The sizes of a tensor as its caller sees it.
std::vector<int64_t> read_sizes(Json& json, size_t most) {
  std::vector<int64_t> sizes;
  json.list([&] {
    require(sizes.size() < most, "an input's or output's rank");
    sizes.push_back(json.integer(1, 1 << 24));
  });
  return sizes;
}

constexpr size_t kMostPorts = 1024, kMostRank = 7;

Port read_input(Json& json) {
  Port port;
  Record record;
  record.field("shape", [&] { port.shape = read_sizes(json, 3); });
  record.field("type", [&] {
    const std::string name = json.text();
    require(name == "float32" || name == "int64", "an input's type");
    port.type = name == "int64" ? Type::Int64 : Type::Float32;
  });
  record.read(json);
  require(!port.shape.empty(), "an input's rank");
  return port;
}

Port read_output(Json& json, std::vector<int>& tensors) {
  Port port;
  Record record;
  record.field("tensor", [&] { tensors.push_back(int(json.integer(0, 1 << 20))); });
  record.field("shape", [&] { port.shape = read_sizes(json, kMostRank); });
  record.read(json);
  return port;
}

/// [c], [c, w] or [c, h, w].
Shape shape_of(const Port& port) {
  const auto& s = port.shape;
  return {int(s[0]), s.size() == 3 ? int(s[1]) : 1, s.size() == 1 ? 1 : int(s.back())};
}

/// The lists that one input's and one output's ranks stand for; its sizes wait for the network.
void complete(Meta& meta) {
  const bool image = meta.ranks[0] == 4, flat = meta.input[1] == 1 && meta.input[2] == 1;
  require(meta.ranks[0] != 3 && meta.ranks[1] != 3 && (image || flat), "the input's rank");
  meta.inputs.push_back({{meta.input, meta.input + (image ? 3 : 1)}, Type::Float32});
}

Meta read_meta(const char* begin, const char* end, const Data& data) {
  Json json(begin, end);
  Meta meta;
  Record record;
  bool one = false;
  record.optional("input", [&] { read_numbers(json, 1, 1 << 24, meta.input), one = true; });
  record.optional("ranks", [&] { read_numbers(json, 2, 4, meta.ranks); });
  record.optional("inputs", [&] { json.list([&] { meta.inputs.push_back(read_input(json)); }); });
  record.optional("outputs", [&] { json.list([&] { meta.outputs.push_back(read_output(json, meta.tensors)); }); });
  record.field("notes", [&] { read_notes(json, meta); });
  record.field("ops", [&] { json.list([&] { meta.ops.emplace_back(json, data); }); });
  record.read(json);
  json.end();
  require(one == (meta.ranks[0] != 0) && one == meta.inputs.empty() && one == meta.outputs.empty(),
          "it must have input and ranks, or inputs and outputs");
  require(meta.inputs.size() <= kMostPorts && meta.outputs.size() <= kMostPorts, "it has more than 1024 inputs or outputs");
  if (one) complete(meta);
  return meta;
}

/// The header's checks; returns the length of META.
size_t check_header(const uint8_t* bytes, size_t size) {
  require(size >= kHeader && std::memcmp(bytes, "DCILPLAN", 8) == 0, "it does not begin like one");
  const uint32_t version = number_at<uint32_t>(bytes + 8), zero = number_at<uint32_t>(bytes + 12);
  if (version < 1 || version > kNewestVersion || zero)
    throw Error("version " + std::to_string(version) + ", but this dcil-runtime reads 1 to " +
                std::to_string(kNewestVersion) + " (a newer one may read it)");
  const uint64_t meta = number_at<uint64_t>(bytes + 16), data = number_at<uint64_t>(bytes + 24), rest = size - kHeader;
  require(meta <= rest && data == rest - meta, "it has been cut short or grown");
  if (meta > kMaxMeta)
    throw Error("its description has " + std::to_string(meta) + " bytes, more than " + std::to_string(kMaxMeta));
  require(std::memcmp(sha256(bytes + kHeader, rest).data(), bytes + 32, 32) == 0, "its checksum is wrong");
  return size_t(meta);
}

}  // namespace

namespace {

/// Checks the outputs against the network, or takes its last tensor's shape.
void settle_outputs(Meta& meta, Graph& graph) {
  if (meta.outputs.empty()) {
    const Shape out = graph.shapes()[size_t(graph.outputs()[0])];
    require(meta.ranks[1] == 4 || (out.h == 1 && out.w == 1), "the output is not a vector");
    meta.outputs.push_back({{out.c}, Type::Float32});
    if (meta.ranks[1] == 4) meta.outputs[0].shape = {out.c, out.h, out.w};
  } else {
    graph.set_outputs(meta.tensors);
  }
  for (size_t i = 0; i < meta.outputs.size(); i++) {
    const int tensor = graph.outputs()[i];
    require(!graph.quant(tensor), "the output is quantized, but a network's output is float32");
    double size = 1;  // does not overflow
    for (int64_t side : meta.outputs[i].shape) size *= double(side);
    require(size == double(graph.shapes()[size_t(tensor)].size()), "an output has another number of elements than its tensor");
  }
}

}  // namespace

PlanFile parse_plan(const uint8_t* bytes, size_t size, const Limits& limits) {
  const size_t meta_size = check_header(bytes, size);
  const uint8_t *text = bytes + kHeader, *data = text + meta_size;
  Meta meta = read_meta(reinterpret_cast<const char*>(text), reinterpret_cast<const char*>(data),
                        {data, size - kHeader - meta_size});
  const uint32_t version = number_at<uint32_t>(bytes + 8);
  if (!meta.outputs.empty() && version < 2) throw Error("version 1 has one input and one output");
  const Shape first{meta.input[0], meta.input[1], meta.input[2]};
  Graph graph(meta.outputs.empty() ? first : shape_of(meta.inputs[0]), limits, meta.inputs[0].type);
  for (size_t i = 1; i < meta.inputs.size(); i++) graph.add_input(shape_of(meta.inputs[i]), meta.inputs[i].type);
  double needed = 0;  // counted as a whole before any of it is copied: operators may share their arrays
  for (const StoredOp& op : meta.ops) {
    needed += op.bytes();
    if (op.version > version) throw Error("version " + std::to_string(version) + " has not all that its operators use");
  }
  graph.claim(needed);
  for (size_t i = 0; i < meta.ops.size(); i++) {
    const std::string kind = operator_of(meta.ops[i].op.kind).name;
    try {
      graph.add(std::move(meta.ops[i]).unpacked());
    } catch (const Error& error) {
      throw Error("operator " + std::to_string(i) + " (" + kind + "): " + error.what());
    }
  }
  settle_outputs(meta, graph);
  return {{version, size, std::move(meta.inputs), std::move(meta.outputs), std::move(meta.notes)}, std::move(graph)};
}

}  // namespace dcil
