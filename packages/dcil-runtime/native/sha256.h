// SHA-256 (FIPS 180-4).
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>

namespace dcil {

std::array<uint8_t, 32> sha256(const uint8_t* data, size_t size);

}  // namespace dcil
