// What main.cpp runs; each returns how many failures it printed.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

int check_networks();
int check_quantized();
int check_stored(const std::vector<std::string>& files);
int check_mutants(const std::vector<std::string>& files, double seconds, uint32_t seed);

/// The bytes of a file; throws std::runtime_error if there are none.
std::vector<uint8_t> bytes_of(const std::string& file);
