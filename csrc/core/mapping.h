#pragma once

#include <cstddef>

#include "core/fd.h"

namespace torchtp {

// Address space, mapped for as long as it lives. No memory is reserved: touching is what takes pages.
class Mapping {
 public:
  explicit Mapping(size_t num_bytes);         // anonymous, private to this process and its copies
  Mapping(const Fd& file, size_t num_bytes);  // the file's first bytes, shared with everybody who maps it
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::byte* data() const { return data_; }
  size_t num_bytes() const { return num_bytes_; }

 private:
  std::byte* data_ = nullptr;
  size_t num_bytes_ = 0;
};

}  // namespace torchtp
