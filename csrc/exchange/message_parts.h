#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/halo_move.h"

namespace torchtp::exchange {

// Bytes [begin, begin + num_bytes) of a message's payload, behind a header at `place` of what carries them.
struct MessagePart {
  size_t message;
  int64_t begin, num_bytes;
  size_t place;

  size_t payload() const { return place + sizeof(kernels::HaloHeader); }
};

// What one rank sends another in one exchange, cut into what is carried at once; both sides cut it alike.
struct MessageChunks {
  bool whole = true;  // in one chunk
  std::vector<std::vector<MessagePart>> chunks;
};

inline size_t line_up(size_t num_bytes) { return (num_bytes + 63) / 64 * 64; }

// One chunk if all fits into `whole_bytes`, else chunks of `part_bytes`; payloads are cut at multiples of 64 bytes.
inline MessageChunks cut_messages(const std::vector<int64_t>& sizes, size_t whole_bytes, size_t part_bytes) {
  constexpr size_t kHeader = sizeof(kernels::HaloHeader);
  size_t total = 0;
  for (const int64_t size : sizes) total += kHeader + line_up(static_cast<size_t>(size));
  MessageChunks out;
  out.whole = total <= whole_bytes;
  const size_t limit = out.whole ? whole_bytes : part_bytes;
  size_t used = limit;
  for (size_t message = 0; message < sizes.size(); ++message) {
    const auto size = static_cast<size_t>(sizes[message]);
    size_t done = 0;
    do {
      if (used + kHeader + std::min<size_t>(size - done, 64) > limit) {
        out.chunks.emplace_back();
        used = 0;
      }
      const size_t part = std::min(size - done, (limit - used - kHeader) / 64 * 64);
      out.chunks.back().push_back({message, static_cast<int64_t>(done), static_cast<int64_t>(part), used});
      done += part;
      used += kHeader + line_up(part);
    } while (done < size);
  }
  return out;
}

}  // namespace torchtp::exchange
