#include "core/stream_copy.h"

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace torchtp {

#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)

void stream_copy(std::byte* out, const std::byte* in, size_t num_bytes) {
  if (num_bytes < kStreamedBytes) {
    std::memcpy(out, in, num_bytes);
    return;
  }
  constexpr size_t kLine = 4 * sizeof(__m128i);  // written whole, else memory is read first
  size_t done = -reinterpret_cast<uintptr_t>(out) % kLine;
  std::memcpy(out, in, done);
  for (; done + kLine <= num_bytes; done += kLine) {
    const auto* const from = reinterpret_cast<const __m128i*>(in + done);
    auto* const to = reinterpret_cast<__m128i*>(out + done);
    const __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
    const __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, a);
    _mm_stream_si128(to + 1, b);
    _mm_stream_si128(to + 2, c);
    _mm_stream_si128(to + 3, d);
  }
  std::memcpy(out + done, in + done, num_bytes - done);
  _mm_sfence();  // streaming stores are not ordered with later stores by themselves
}

#else

void stream_copy(std::byte* out, const std::byte* in, size_t num_bytes) { std::memcpy(out, in, num_bytes); }

#endif

void result_copy(std::byte* out, const std::byte* in, size_t num_bytes, size_t total_bytes) {
  if (is_large_result(total_bytes)) {
    stream_copy(out, in, num_bytes);
  } else if (num_bytes != 0) {
    std::memcpy(out, in, num_bytes);
  }
}

}  // namespace torchtp
