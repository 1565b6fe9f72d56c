#include "core/stream_copy.h"

#include <cstdint>
#include <cstring>
#include <fstream>
#include <string>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace torchtp {

// The thread sanitizer does not see streaming stores.
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

namespace {

std::string first_line(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

bool is_intel() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_is("intel");
#else
  return false;
#endif
}

bool all_share_a_cache() {
  const std::string online = first_line("/sys/devices/system/cpu/online");
  return !online.empty() && online == first_line("/sys/devices/system/cpu/cpu0/cache/index3/shared_cpu_list");
}

}  // namespace

bool stages_past_caches() {
  static const bool past = !(is_intel() && all_share_a_cache());
  return past;
}

void stage_copy(std::byte* out, const std::byte* in, size_t num_bytes) {
  if (stages_past_caches()) {
    stream_copy(out, in, num_bytes);
  } else {
    std::memcpy(out, in, num_bytes);
  }
}

}  // namespace torchtp
