// Stored plan files through the C interface: NAME.dcil run on NAME.in0.npy gives NAME.out0.npy.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <stdexcept>

#include "check.h"
#include "dcil_runtime.h"

namespace {

constexpr float kTolerance = 1e-6f;  // of the largest output

/// The elements in a file of numpy, whatever their type.
std::vector<uint8_t> elements_of(const std::string& file) {
  const auto bytes = bytes_of(file);
  constexpr size_t start = 10;  // magic, version, and the length of the header in two bytes
  const size_t header = bytes.size() < start ? 0 : size_t(bytes[8]) + 256 * size_t(bytes[9]);
  if (bytes.size() <= start + header || std::memcmp(bytes.data(), "\x93NUMPY\x01", 7) != 0)
    throw std::runtime_error(file + ": not an array of numpy");
  return {bytes.begin() + long(start + header), bytes.end()};
}

using Describe = int (*)(const dcil_plan*, int, dcil_tensor*, char*);

/// The stored elements of all inputs or all outputs; how many images they hold, in `count`.
std::vector<std::vector<uint8_t>> stored(const dcil_plan* plan, int tensors, Describe describe, const std::string& stem,
                                         int& count) {
  std::vector<std::vector<uint8_t>> all;
  for (int i = 0; i < tensors; i++) {
    dcil_tensor tensor;
    describe(plan, i, &tensor, nullptr);
    all.push_back(elements_of(stem + std::to_string(i) + ".npy"));
    const size_t each = size_t(tensor.elements) * (tensor.type == DCIL_INT64 ? sizeof(int64_t) : sizeof(float));
    if (all.back().size() % each) throw std::runtime_error(stem + ": of another shape than the plan's");
    count = int(all.back().size() / each);
  }
  return all;
}

/// The largest difference, as a part of the largest number.
float difference(const std::vector<uint8_t>& want, const std::vector<uint8_t>& got) {
  float most = 1e-30f, apart = 0;
  for (size_t i = 0; i < want.size(); i += sizeof(float)) {
    float a, b;
    std::memcpy(&a, want.data() + i, sizeof a);
    std::memcpy(&b, got.data() + i, sizeof b);
    most = std::max(most, std::fabs(a));
    apart = std::max(apart, std::isnan(b) ? INFINITY : std::fabs(a - b));
  }
  return apart / most;
}

/// One file with one instruction set and number of threads; returns the largest difference of its outputs.
float compare(const std::string& file, const char* isa, int threads) {
  char error[DCIL_ERROR_SIZE];
  dcil_options options = DCIL_OPTIONS;
  options.isa = isa;
  options.threads = threads;
  options.tune_seconds = 0.01;
  dcil_plan* plan;
  if (dcil_load(file.c_str(), &options, &plan, error) != DCIL_OK) throw std::runtime_error(file + ": " + error);
  const std::string stem = file.substr(0, file.rfind('.'));
  int images = 0, outputs = 0;
  const auto in = stored(plan, dcil_inputs(plan), dcil_input, stem + ".in", images);
  const auto want = stored(plan, dcil_outputs(plan), dcil_output, stem + ".out", outputs);
  auto got = want;
  std::vector<const void*> from;
  std::vector<void*> to;
  for (const auto& x : in) from.push_back(x.data());
  for (auto& y : got) to.push_back(y.data());
  float apart = images == outputs ? 0 : INFINITY;
  for (int count : {images, 1}) {
    for (auto& y : got) std::memset(y.data(), 0xff, y.size() / size_t(images) * size_t(count));
    if (dcil_run(plan, from.data(), count, to.data(), error) != DCIL_OK) throw std::runtime_error(file + ": " + error);
    for (size_t i = 0; i < want.size(); i++) apart = std::max(apart, difference(want[i], got[i]));
  }
  dcil_free(plan);
  return apart;
}

}  // namespace

int check_stored(const std::vector<std::string>& files) {
  int failed = 0;
  for (const char* isa : {"avx512", "avx2", "neon", "wide", "portable"}) {
    if (!dcil_isa(isa)) continue;
    for (const std::string& file : files)
      for (int threads : {1, 2}) {
        const float apart = compare(file, isa, threads);
        if (apart <= kTolerance) continue;
        failed++;
        std::printf("%s with %s, %d threads: outputs differ by %g\n", file.c_str(), isa, threads, double(apart));
      }
    std::printf("stored: %zu files with %s\n", files.size(), isa);
  }
  std::printf("stored: %d failures\n", failed);
  return failed;
}
