#pragma once

#include <cstddef>

namespace torchtp {

// Less than this is copied as ever: it is as fast.
constexpr size_t kStreamedBytes = 2048;

// Copies to memory that another core will read next, past the caches of this one where the processor can do that: an
// ordinary store would first fetch the line, often from the very core that is about to read it again. When it returns,
// a release store (of a flag, of a ring's head) makes the bytes visible as usual.
void stream_copy(std::byte* out, const std::byte* in, size_t num_bytes);

}  // namespace torchtp
