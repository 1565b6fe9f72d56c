#include "core/stream_copy.h"

#include <algorithm>
#include <vector>

#include "check.h"

namespace {

void every_length_is_copied_and_nothing_else(void (*copy)(std::byte*, const std::byte*, size_t)) {
  constexpr std::byte kUntouched{0xEE};
  std::vector<std::byte> source(5100);
  for (size_t i = 0; i < source.size(); ++i) source[i] = static_cast<std::byte>(i * 7 + i / 256);
  for (size_t length = 0; length <= 5000; length += length < 200 || length > 2000 ? 1 : 37) {
    alignas(64) std::byte target[5100];
    std::fill(std::begin(target), std::end(target), kUntouched);
    const size_t shift = length % 61, gap = length % 83;  // both may lie anywhere
    copy(target + gap, source.data() + shift, length);
    CHECK(std::equal(target + gap, target + gap + length, source.data() + shift));
    CHECK(std::all_of(target, target + gap, [&](std::byte b) { return b == kUntouched; }));
    CHECK(std::all_of(target + gap + length, std::end(target), [&](std::byte b) { return b == kUntouched; }));
  }
}

}  // namespace

int main() {
  return torchtp::test::run({
      {"past the caches", [] { every_length_is_copied_and_nothing_else(torchtp::stream_copy); }},
      {"for another core", [] { every_length_is_copied_and_nothing_else(torchtp::stage_copy); }},
  });
}
