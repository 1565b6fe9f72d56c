#include "core/claim_lines.h"

#include <algorithm>

#include "core/stream_copy.h"

namespace torchtp {

void claim_lines(std::byte* data, size_t num_bytes) {
  constexpr size_t kLine = 64;
  const auto* const end = data + num_bytes;
  for (volatile std::byte* byte = data; byte < end; byte += kLine) *byte = *byte;
}

void claiming_copy(std::byte* out, std::byte* in, size_t num_bytes, size_t total_bytes) {
  // Past the caches not in blocks: each would wait for its stores, and 25 MB take 2.9 ms instead of 2.0.
  const size_t block_bytes = is_large_result(total_bytes) ? num_bytes : size_t{4} << 10;
  for (size_t done = 0; done < num_bytes; done += block_bytes) {
    const size_t size = std::min(block_bytes, num_bytes - done);
    result_copy(out + done, in + done, size, total_bytes);
    claim_lines(in + done, size);
  }
}

}  // namespace torchtp
