#pragma once

#include <cstddef>

namespace torchtp {

// Whether this build can copy past the caches. The thread sanitizer does not see such stores.
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)
constexpr bool kCanStream = true;
#else
constexpr bool kCanStream = false;
#endif

// Less than this is copied as ever: it is as fast.
constexpr size_t kStreamedBytes = 2048;

// Copies past the caches of this core where the processor can do that: an ordinary store would first fetch the line,
// often from the very core that is about to read it. When it returns, a release store (of a flag, of a ring's head)
// makes the bytes visible as usual.
void stream_copy(std::byte* out, const std::byte* in, size_t num_bytes);

// What does not stay in the caches.
inline bool is_large_result(size_t total_bytes) { return total_bytes >= size_t{16} << 20; }

// A piece of a result of `total_bytes` that this core alone reads: a large one past the caches, and what is overwritten
// need not be fetched.
void result_copy(std::byte* out, const std::byte* in, size_t num_bytes, size_t total_bytes);

}  // namespace torchtp
