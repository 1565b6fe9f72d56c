#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace torchtp {

// What a message between two ranks holds, as its sender and its receiver each say it: they must say the same.
struct Contents {
  size_t num_bytes;
  uint8_t dtype;  // by the numbers of whoever uses the messages

  Contents(size_t bytes = 0, uint8_t type = 0) : num_bytes(bytes), dtype(type) {}  // NOLINT: bytes are contents

  bool operator==(const Contents& other) const { return num_bytes == other.num_bytes && dtype == other.dtype; }
  bool operator!=(const Contents& other) const { return !(*this == other); }
};

// Words for messages: "16 bytes of fp32".
using DescribeContents = std::string (*)(const Contents& contents);

inline std::string in_bytes(const Contents& contents) { return std::to_string(contents.num_bytes) + " bytes"; }

}  // namespace torchtp
