#include "core/stream_copy.h"

#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace torchtp {

// The thread sanitizer does not see streaming stores.
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)

void stream_copy(std::byte* out, const std::byte* in, size_t num_bytes) {
  constexpr size_t kStep = 4 * sizeof(__m128i);
  size_t done = 0;
  for (; done + kStep <= num_bytes; done += kStep) {
    const auto* const from = reinterpret_cast<const __m128i*>(in + done);
    auto* const to = reinterpret_cast<__m128i*>(out + done);
    const __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
    const __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, a);
    _mm_stream_si128(to + 1, b);
    _mm_stream_si128(to + 2, c);
    _mm_stream_si128(to + 3, d);
  }
  // Streaming stores are not ordered with later stores by themselves.
  _mm_sfence();
  std::memcpy(out + done, in + done, num_bytes - done);
}

#else

void stream_copy(std::byte* out, const std::byte* in, size_t num_bytes) { std::memcpy(out, in, num_bytes); }

#endif

}  // namespace torchtp
