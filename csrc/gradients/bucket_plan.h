#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace torchtp::gradients {

// What decides in which bucket a parameter's gradient travels.
struct Traveller {
  int64_t num_bytes = 0;
  std::string kind;  // dtype and device: a bucket has one
};

// Parameters, by index, of each bucket in the order in which the buckets become complete when gradients come in
// `order`. A bucket is full once it holds max_bytes; the first of them all, which can leave early, once it holds
// first_bytes.
std::vector<std::vector<size_t>> plan_buckets(const std::vector<Traveller>& travellers,
                                              const std::vector<int64_t>& order, int64_t first_bytes,
                                              int64_t max_bytes);

}  // namespace torchtp::gradients
