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
  int input[3], ranks[2];
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

Meta read_meta(const char* begin, const char* end, const Data& data) {
  Json json(begin, end);
  Meta meta;
  Record record;
  record.field("input", [&] { read_numbers(json, 1, 1 << 24, meta.input); });
  record.field("ranks", [&] { read_numbers(json, 2, 4, meta.ranks); });
  record.field("notes", [&] { read_notes(json, meta); });
  record.field("ops", [&] { json.list([&] { meta.ops.emplace_back(json, data); }); });
  record.read(json);
  json.end();
  const bool image = meta.ranks[0] == 4, flat = meta.input[1] == 1 && meta.input[2] == 1;
  require(meta.ranks[0] != 3 && meta.ranks[1] != 3 && (image || flat), "the input's rank");
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

PlanFile parse_plan(const uint8_t* bytes, size_t size, const Limits& limits) {
  const size_t meta_size = check_header(bytes, size);
  const uint8_t *text = bytes + kHeader, *data = text + meta_size;
  Meta meta = read_meta(reinterpret_cast<const char*>(text), reinterpret_cast<const char*>(data),
                        {data, size - kHeader - meta_size});
  Graph graph(Shape{meta.input[0], meta.input[1], meta.input[2]}, limits);
  double needed = 0;  // counted as a whole before any of it is copied: operators may share their arrays
  const uint32_t version = number_at<uint32_t>(bytes + 8);
  for (const StoredOp& op : meta.ops) {
    needed += op.bytes();
    if (op.version > version) throw Error("version " + std::to_string(version) + " has no quantized tensors");
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
  require(!graph.quant(graph.output()), "the output is quantized, but a network's output is float32");
  const Shape out = graph.shapes()[size_t(graph.output())];
  require(meta.ranks[1] == 4 || (out.h == 1 && out.w == 1), "the output is not a vector");
  return {{version, size, meta.ranks[0], meta.ranks[1], std::move(meta.notes)}, std::move(graph)};
}

}  // namespace dcil
