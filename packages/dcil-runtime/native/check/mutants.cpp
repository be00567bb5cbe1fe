// Plan files changed at random and sealed again, so that only the reader's checks stand between them and the engine.
//
// What is accepted is run with two instruction sets, whose outputs must agree. A case depends on the seed and its
// number alone; a sanitizer's report and a case that does not end name both.
#include <csignal>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>

#include "../sha256.h"
#include "check.h"
#include "dcil_runtime.h"

extern "C" __attribute__((weak)) void __sanitizer_set_death_callback(void (*)());

namespace {

constexpr size_t kHeader = 64;
constexpr int64_t kMostElements = 1 << 18;
constexpr unsigned kMostSeconds = 60;

uint32_t seed_now, case_now;

void name_case() {
  char text[80];
  const int size = std::snprintf(text, sizeof text, "mutants: seed %u, case %u\n", seed_now, case_now);
  if (write(2, text, size_t(size)) < 0) std::abort();
}

void never_ends(int) {
  name_case();
  std::abort();
}

struct File {
  std::string meta;
  std::vector<uint8_t> data;
};

File opened(const std::string& name) {
  const auto bytes = bytes_of(name);
  uint64_t size = 0;
  if (bytes.size() >= kHeader) std::memcpy(&size, bytes.data() + 16, sizeof size);
  if (size > bytes.size() - kHeader) throw std::runtime_error(name + ": not a plan");
  const auto meta = bytes.begin() + kHeader, data = meta + long(size);
  return {{meta, data}, {data, bytes.end()}};
}

std::vector<uint8_t> sealed(const File& file, uint32_t version) {
  std::vector<uint8_t> bytes(kHeader);
  const uint64_t sizes[] = {file.meta.size(), file.data.size()};
  bytes.insert(bytes.end(), file.meta.begin(), file.meta.end());
  bytes.insert(bytes.end(), file.data.begin(), file.data.end());
  std::memcpy(bytes.data(), "DCILPLAN", 8);
  std::memcpy(bytes.data() + 8, &version, sizeof version);
  std::memcpy(bytes.data() + 16, sizes, sizeof sizes);
  const auto digest = dcil::sha256(bytes.data() + kHeader, bytes.size() - kHeader);
  std::memcpy(bytes.data() + 32, digest.data(), digest.size());
  return bytes;
}

struct Part {
  size_t begin, size;
};

/// Numbers, strings and null.
std::vector<Part> tokens(const std::string& text) {
  std::vector<Part> found;
  for (size_t i = 0; i < text.size();) {
    size_t end = i;
    if (text[i] == '"') {
      end = text.find('"', i + 1);
      end = end == std::string::npos ? text.size() : end + 1;
    } else {
      while (end < text.size() && !std::strchr("\"[]{}:,", text[end])) end++;
    }
    if (end > i) found.push_back({i, end - i});
    i = end > i ? end : i + 1;
  }
  return found;
}

/// Lists and objects.
std::vector<Part> branches(const std::string& text) {
  std::vector<Part> found;
  std::vector<size_t> open;
  for (size_t i = 0; i < text.size(); i++) {
    if (text[i] == '[' || text[i] == '{') open.push_back(i);
    if ((text[i] != ']' && text[i] != '}') || open.empty()) continue;
    found.push_back({open.back(), i + 1 - open.back()});
    open.pop_back();
  }
  return found;
}

class Chance {
 public:
  explicit Chance(uint32_t seed, uint32_t number) : rng_{(uint64_t(seed) << 32) + number} {}
  size_t below(size_t end) { return end ? size_t(rng_() % end) : 0; }
  template <class List>
  const auto& one_of(const List& list) {
    return list[below(std::size(list))];
  }
  float normal() { return normal_(rng_); }

 private:
  std::mt19937_64 rng_;
  std::normal_distribution<float> normal_;
};

const char* const kNasty[] = {"-1",    "0",     "1",       "2",          "3",          "5",   "8",
                              "17",    "4096",  "65536",   "1048577",    "2147483647", "0.5", "4294967296",
                              "-2.0",  "1e30",  "null",    "true",       "\"\"",       "[]",  "{}",
                              "9223372036854775807"};
constexpr uint32_t kNastyBits[] = {0,          1,          0x00000100, 0x7f000000, 0x7f800000,
                                   0xff800000, 0x7fc00000, 0x7fffffff, 0x80000000, 0xffffffff};

/// A part of another file's META.
std::string transplant(const std::vector<File>& files, std::vector<Part> (*parts)(const std::string&), Chance& chance) {
  const std::string& text = chance.one_of(files).meta;
  const auto found = parts(text);
  const Part part = chance.one_of(found);
  return text.substr(part.begin, part.size);
}

void mutate_meta(std::string& meta, const std::vector<File>& files, Chance& chance) {
  const auto words = tokens(meta), lists = branches(meta);
  const auto number = [&](const Part& part) { return meta[part.begin] != '"'; };
  if (lists.empty() || std::none_of(words.begin(), words.end(), number)) return;
  Part word = chance.one_of(words);
  const Part list = chance.one_of(lists);
  const auto replace = [&](const Part& part, const std::string& by) { meta.replace(part.begin, part.size, by); };
  switch (chance.below(8)) {
    case 0: return replace(word, chance.one_of(kNasty));
    case 1: return replace(word, transplant(files, tokens, chance));
    case 2: return replace(list, transplant(files, branches, chance));
    case 3: return replace(list, transplant({{meta, {}}}, branches, chance));
    case 4: return void(meta[chance.below(meta.size())] = char(chance.below(256)));
    default:  // a number becomes one near by
      while (!number(word)) word = chance.one_of(words);
      // Unsigned: the largest number may be there.
      replace(word, std::to_string(long(uint64_t(std::atol(meta.c_str() + word.begin)) + chance.below(5) - 2)));
  }
}

void mutate_data(std::vector<uint8_t>& data, Chance& chance) {
  if (data.size() < 4 || chance.below(4) == 0) return data.resize(chance.below(data.size() + 8));
  const uint32_t bits = chance.one_of(kNastyBits);
  std::memcpy(data.data() + chance.below(data.size() / 4) * 4, &bits, sizeof bits);
}

/// The bytes of every input or output of a batch, in memory of their own.
using Buffers = std::vector<std::vector<uint8_t>>;

/// None if they are too large to be worth it.
Buffers buffers(const dcil_plan* plan, int tensors, int (*describe)(const dcil_plan*, int, dcil_tensor*, char*), int count,
                Chance& chance) {
  Buffers all;
  int64_t total = 0;
  for (int i = 0; i < tensors; i++) {
    dcil_tensor tensor;
    describe(plan, i, &tensor, nullptr);
    if ((total += tensor.elements * count) > kMostElements) return {};
    const bool whole = tensor.type == DCIL_INT64;
    all.emplace_back(size_t(tensor.elements * count) * (whole ? sizeof(int64_t) : sizeof(float)));
    for (int64_t e = 0; e < tensor.elements * count; e++) {
      const int64_t number = int64_t(chance.below(chance.below(200) ? 5 : 1000)) - (chance.below(1000) ? 0 : 1);
      const float noise = chance.normal();
      if (whole) std::memcpy(all.back().data() + size_t(e) * sizeof number, &number, sizeof number);
      if (!whole) std::memcpy(all.back().data() + size_t(e) * sizeof noise, &noise, sizeof noise);
    }
  }
  return all;
}

template <class Pointer>
std::vector<Pointer> addresses(Buffers& all) {
  std::vector<Pointer> found;
  for (auto& bytes : all) found.push_back(bytes.data());
  return found;
}

enum class Verdict { Refused, Large, Accepted };

/// Loads and runs a batch that `chance` decides; y: the outputs, one after the other.
Verdict run(const std::vector<uint8_t>& bytes, const char* isa, int threads, Chance chance, std::vector<float>& y) {
  dcil_options options = DCIL_OPTIONS;
  options.isa = isa;
  options.threads = threads;
  options.tune_seconds = 0;
  options.max_memory = 1 << 26;
  options.max_work = 1 << 24;
  dcil_plan* plan;
  if (dcil_load_bytes(bytes.data(), bytes.size(), &options, &plan, nullptr) != DCIL_OK) return Verdict::Refused;
  const std::unique_ptr<dcil_plan, void (*)(dcil_plan*)> owner(plan, dcil_free);
  char* text;
  if (dcil_info(plan, &text, nullptr) == DCIL_OK) dcil_free_text(text);
  const int count = 1 + int(chance.below(5));
  Buffers in = buffers(plan, dcil_inputs(plan), dcil_input, count, chance);
  Buffers out = buffers(plan, dcil_outputs(plan), dcil_output, count, chance);
  if (in.empty() || out.empty()) return Verdict::Large;
  const auto from = addresses<const void*>(in);
  const auto to = addresses<void*>(out);
  if (dcil_run(plan, from.data(), count, to.data(), nullptr) != DCIL_OK) return Verdict::Refused;
  y.clear();
  for (const auto& bytes : out) {
    const size_t before = y.size();
    y.resize(before + bytes.size() / sizeof(float));
    std::memcpy(y.data() + before, bytes.data(), bytes.size());
  }
  return Verdict::Accepted;
}

bool agree(const std::vector<float>& a, const std::vector<float>& b) {
  float most = 0, apart = 0;
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); i++) {
    if (!std::isfinite(a[i]) || !(std::fabs(a[i]) < 1e5f)) return true;  // sums of such numbers may be anything
    most = std::max(most, std::fabs(a[i]));
    apart = std::max(apart, std::isfinite(b[i]) ? std::fabs(a[i] - b[i]) : INFINITY);
  }
  return apart <= 1e-5f + 1e-3f * most;
}

struct Count {
  uint32_t accepted = 0, compared = 0, failed = 0;
};

void check_mutant(const std::vector<File>& files, const std::vector<const char*>& sets, Chance chance, Count& count) {
  File file = chance.one_of(files);
  // With other weights rounding may decide an output: such are run, but not compared.
  // What is rounded to u8 may be off by a step where floats are: tests compare such networks to the bit.
  const bool other_data = chance.below(4) == 0, comparable = !other_data && file.meta.find("quant") == std::string::npos;
  if (other_data) mutate_data(file.data, chance);
  for (size_t i = 0, n = chance.below(3) ? 1 : 4; i < n; i++) mutate_meta(file.meta, files, chance);
  const auto bytes = sealed(file, 1 + uint32_t(chance.below(size_t(dcil_format()))));
  const char *isa = chance.one_of(sets), *other = chance.one_of(sets);
  const int threads = 1 + int(chance.below(2));
  std::vector<float> y, again;
  if (run(bytes, isa, threads, chance, y) != Verdict::Accepted) return;
  count.accepted++;
  if (!comparable || run(bytes, other, 1, chance, again) != Verdict::Accepted) return;
  count.compared++;
  if (agree(y, again)) return;
  count.failed++;
  std::printf("seed %u, case %u: %s and %s disagree\n", seed_now, case_now, isa, other);
}

}  // namespace

int check_mutants(const std::vector<std::string>& names, double seconds, uint32_t seed) {
  std::vector<File> files;
  for (const auto& name : names) files.push_back(opened(name));
  std::vector<const char*> sets;
  for (const char* isa : {"avx512", "avx2", "neon", "wide", "portable"})
    if (dcil_isa(isa)) sets.push_back(isa);
  seed_now = seed;
  if (&__sanitizer_set_death_callback) __sanitizer_set_death_callback(name_case);
  std::signal(SIGALRM, never_ends);
  const auto clock = [] { return std::chrono::steady_clock::now(); };
  const auto end = clock() + std::chrono::duration<double>(seconds);
  Count count;
  for (case_now = 0; clock() < end; case_now++) {
    alarm(kMostSeconds);
    check_mutant(files, sets, Chance(seed, case_now), count);
  }
  alarm(0);
  std::printf("mutants: %u files, %u accepted, %u compared, %u failures (seed %u)\n", case_now, count.accepted,
              count.compared, count.failed, seed);
  return int(count.failed) + (count.accepted == 0 || count.accepted == case_now);
}
