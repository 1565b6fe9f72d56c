#pragma once

#include <cstddef>

namespace torchtp {

// Less than this is copied as ever: it is as fast.
constexpr size_t kStreamedBytes = 2048;

// Copies past the caches of this core where the processor can do that: an ordinary store would first fetch the line,
// often from the very core that is about to read it. When it returns, a release store (of a flag, of a ring's head)
// makes the bytes visible as usual.
void stream_copy(std::byte* out, const std::byte* in, size_t num_bytes);

// Whether that is the better way to write what another core reads next. It is not where all cores share a last-level
// cache that takes in what one of them writes and hands it to the next: Intel's, of one socket.
bool stages_past_caches();

// Copies to memory that another core will read next.
void stage_copy(std::byte* out, const std::byte* in, size_t num_bytes);

}  // namespace torchtp
