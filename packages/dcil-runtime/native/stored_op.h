// An operator as a plan file states it: read from META and checked by itself; its arrays still lie in DATA.
#pragma once
#include <cstring>
#include <iterator>
#include <type_traits>

#include "graph.h"
#include "json.h"

namespace dcil {

/// The part of a file that arrays lie in.
struct Data {
  const uint8_t* begin;
  size_t size;
};

/// A number that may lie anywhere; files are little-endian, as is every CPU that this runs on.
template <class T>
T number_at(const uint8_t* bytes) {
  static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "numbers are taken as they lie");
  T value;
  std::memcpy(&value, bytes, sizeof value);
  return value;
}

/// An array where it lies.
struct Span {
  const uint8_t* data = nullptr;
  int64_t count = 0;

  template <class T>
  std::vector<T> copy() const {
    std::vector<T> out(static_cast<size_t>(count));
    if (count) std::memcpy(out.data(), data, size_t(count) * sizeof(T));
    return out;
  }
};

struct StoredOp {
  /// Vectors with one entry per output channel.
  static constexpr int kVectors = 6;

  StoredOp(Json& json, const Data& data);
  /// What the operator will take: weights with their positions, as if none were zero.
  double bytes() const;
  /// The operator with its arrays copied.
  Op unpacked() &&;

  Op op;
  Span index, weight, vectors[kVectors];
  Span table, tokens;
  uint32_t version = 1;  // of the format: the oldest that has what this operator uses

 private:
  void read_arrays(Json& json, const Data& data);
  float weight_at(int64_t i) const;
  void copy_weights();
};

const char* name_of(Act act);

/// A list of exactly as many whole numbers as `out` has.
template <class Numbers>
void read_numbers(Json& json, int64_t low, int64_t high, Numbers& out) {
  size_t count = 0;
  json.list([&] {
    require(count < std::size(out), "a list of another length");
    out[count++] = static_cast<std::decay_t<decltype(out[0])>>(json.integer(low, high));
  });
  require(count == std::size(out), "a list of another length");
}

}  // namespace dcil
