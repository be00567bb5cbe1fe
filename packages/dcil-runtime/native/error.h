// What a plan or a call is refused with.
#pragma once
#include <stdexcept>

namespace dcil {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline void require(bool ok, const char* what) {
  if (!ok) throw Error(what);
}

}  // namespace dcil
