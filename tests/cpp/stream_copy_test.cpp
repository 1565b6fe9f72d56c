#include "core/stream_copy.h"
#include "core/claim_lines.h"
#include "core/staging.h"

#include <algorithm>
#include <vector>

#include "check.h"

namespace {

using torchtp::Staging;
using Side = Staging::Side;

template <typename Copy>
void every_length_is_copied_and_nothing_else(const Copy& copy) {
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

// In a trial both ways are taken, by turns, and the faster one is kept whatever was the way before.
void the_faster_way_is_kept() {
  for (const bool before : {false, true}) {
    for (const bool faster : {false, true}) {
      Staging staging(before);
      for (int i = 0; i < 64; ++i) staging.took(Side::kWrite, i % 2 != 0, (i % 2 != 0) == faster ? 1.0 : 3.0);
      CHECK_EQUAL(staging.past(), faster);
    }
  }
}

// It has to be read from memory, even where nobody tells how long that takes.
void what_is_written_past_the_caches_counts_twice() {
  Staging staging(true);
  for (int i = 0; i < 16; ++i) staging.took(Side::kWrite, i % 2 != 0, i % 2 != 0 ? 1.0 : 1.5);
  CHECK_EQUAL(staging.past(), false);
}

void what_is_claimed_stays_as_it_is() {
  std::vector<std::byte> memory(10'000, std::byte{7}), target(memory);
  for (size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<std::byte>(i % 251);
  const std::vector<std::byte> before = memory;
  torchtp::claim_lines(memory.data() + 3, 9'000);
  CHECK(memory == before);
  torchtp::claiming_copy(target.data() + 5, memory.data() + 64, 9'000, 9'000);
  CHECK(memory == before);
  CHECK(std::equal(target.begin() + 5, target.begin() + 9'005, memory.begin() + 64));
  CHECK(target[4] == std::byte{7} && target[9'005] == std::byte{7});
  torchtp::claiming_copy(nullptr, nullptr, 0, 0);
}

void one_that_was_held_up_does_not_count() {
  Staging staging(true);
  for (int i = 0; i < 16; ++i) {
    const bool past = i % 2 != 0;
    staging.took(Side::kWrite, past, i < 10 && !past ? 1000.0 : (past ? 2.0 : 1.0));
  }
  CHECK_EQUAL(staging.past(), false);
}

// What is slower to write and quicker to read by more; a single read that was quick tells nothing.
void what_it_costs_to_read_counts() {
  for (const int reads : {1, 8}) {
    Staging staging(true);
    for (int i = 0; i < 2 * reads; ++i) staging.took(Side::kRead, i % 2 != 0, i % 2 != 0 ? 1.0 : 3.0);
    for (int i = 0; i < 16; ++i) staging.took(Side::kWrite, i % 2 != 0, i % 2 != 0 ? 2.0 : 1.0);
    CHECK_EQUAL(staging.past(), reads == 8);
  }
}

// Who reads a message knows the way of each piece that its writer took, and which ones are trials.
void a_message_tells_its_ways() {
  if (!torchtp::kCanStream) return;
  constexpr size_t kBytes = 40 * Staging::kPieceBytes + 5;
  Staging staging(true);
  const Staging::Ways ways = staging.ways_of_message(kBytes);
  int trials = 0, past = 0;
  for (size_t done = 0; done < kBytes; done += Staging::piece_of_message(kBytes, done)) {
    trials += ways.is_trial(done);
    past += ways.past(done);
    CHECK_EQUAL(ways.past(done), ways.past(done + Staging::piece_of_message(kBytes, done) - 1));
  }
  CHECK_EQUAL(trials, 18);
  CHECK(past >= 8 + 23 && past <= 10 + 23);
  CHECK_EQUAL(Staging::piece_of_message(kBytes, 40 * Staging::kPieceBytes), size_t{5});
  CHECK_EQUAL(Staging::piece_of_message(kBytes, 3), Staging::kPieceBytes - 3);
  CHECK_EQUAL(Staging::piece_of_message(0, 0), size_t{0});
}

// Few of many large copies are those of a trial; what a small one does follows from the last.
void trials_are_few_and_take_both_ways() {
  if (!torchtp::kCanStream) return;
  Staging staging(true);
  int changes = 0, past = 0;
  for (int i = 0; i < 2000; ++i) {
    const Staging::Copy small(staging, 100), large(staging, size_t{1} << 20);
    CHECK_EQUAL(small.past(), false);
    changes += large.past() != staging.past();
    past += large.past();
  }
  CHECK(changes > 0 && changes < 100);
  CHECK(past > 0 && past < 2000);
}

}  // namespace

int main() {
  return torchtp::test::run({
      {"past the caches", [] { every_length_is_copied_and_nothing_else(torchtp::stream_copy); }},
      {"for another core",
       [] {
         Staging staging;
         every_length_is_copied_and_nothing_else(
             [&](std::byte* out, const std::byte* in, size_t n) { staging.copy(out, in, n); });
       }},
      {"a large result",
       [] {
         every_length_is_copied_and_nothing_else([](std::byte* out, const std::byte* in, size_t n) {
           torchtp::result_copy(out, in, n, n % 2 == 0 ? n : size_t{1} << 30);
         });
       }},
      {"the faster way is kept", the_faster_way_is_kept},
      {"what is written past the caches counts twice", what_is_written_past_the_caches_counts_twice},
      {"what is claimed stays as it is", what_is_claimed_stays_as_it_is},
      {"one that was held up does not count", one_that_was_held_up_does_not_count},
      {"what it costs to read counts", what_it_costs_to_read_counts},
      {"a message tells its ways", a_message_tells_its_ways},
      {"trials are few and take both ways", trials_are_few_and_take_both_ways},
  });
}
