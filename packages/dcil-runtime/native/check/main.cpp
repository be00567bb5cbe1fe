// Checks of the native module as a program, for sanitizers and emulators to watch:
//
//   check networks               random networks against their definition, callers at once, forks
//   check stored FILE...         stored plan files against stored outputs, with every instruction set of this CPU
//   check mutants SECONDS SEED FILE...    plan files changed at random, with a right checksum
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <stdexcept>

#include "check.h"

std::vector<uint8_t> bytes_of(const std::string& file) {
  std::ifstream stream(file, std::ios::binary);
  std::vector<uint8_t> bytes{std::istreambuf_iterator<char>(stream), {}};
  if (bytes.empty()) throw std::runtime_error(file + ": not there, or empty");
  return bytes;
}

int main(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  const auto from = [&](size_t i) { return std::vector<std::string>(words.begin() + long(i), words.end()); };
  const std::string what = words.empty() ? "networks" : words[0];
  try {
    if (what == "networks") return check_networks() + check_quantized() != 0;
    if (what == "stored" && words.size() > 1) return check_stored(from(1)) != 0;
    if (what == "mutants" && words.size() > 3)
      return check_mutants(from(3), std::atof(words[1].c_str()), uint32_t(std::atol(words[2].c_str()))) != 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
  std::fprintf(stderr, "usage: check networks | check stored FILE... | check mutants SECONDS SEED FILE...\n");
  return 2;
}
