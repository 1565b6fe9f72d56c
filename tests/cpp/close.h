#pragma once

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "check.h"

namespace torchtp::test {

// Values with a mean far from zero, so that cancellation shows.
inline std::vector<double> noise(int64_t count, unsigned seed, double mean = 0) {
  std::mt19937 random(seed);
  std::vector<double> values(count);
  for (double& value : values) value = mean + static_cast<double>(random() % 20001) / 10000.0 - 1;
  return values;
}

// As T holds them: the reference computes on what the kernel gets.
template <typename T>
std::vector<T> rounded(std::vector<double>& values) {
  std::vector<T> result(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    result[i] = static_cast<T>(static_cast<float>(values[i]));
    values[i] = static_cast<double>(static_cast<float>(result[i]));
  }
  return result;
}

// |found - expected| <= tolerance * (|expected| + typical size of all).
template <typename T>
void check_close(const std::vector<T>& found, const std::vector<double>& expected, double tolerance,
                 const std::string& what) {
  CHECK_EQUAL(found.size(), expected.size());
  double typical = 0;
  for (double value : expected) typical += std::fabs(value) / static_cast<double>(expected.size());
  for (size_t i = 0; i < found.size(); ++i) {
    const double here = static_cast<double>(static_cast<float>(found[i]));
    if (!(std::fabs(here - expected[i]) <= tolerance * (std::fabs(expected[i]) + typical))) {
      fail(__FILE__, __LINE__,
           what + ": element " + std::to_string(i) + " is " + std::to_string(here) + ", expected " +
               std::to_string(expected[i]));
    }
  }
}

// Rounding of T, for results whose sums are taken in float.
template <typename T>
constexpr double tolerance() {
  return sizeof(T) == 2 ? 1.0 / 128 : 1e-5;
}

}  // namespace torchtp::test
