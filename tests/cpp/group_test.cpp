// Rounds, errors and heaps of a group whose ranks are threads.

#include <cstring>
#include <future>
#include <random>

#include "check.h"
#include "ranks.h"
#include "shm/group.h"
#include "shm/host.h"
#include "shm/layout.h"

using torchtp::test::error_of;
using torchtp::test::run_threads;
using namespace torchtp::shm;
using std::chrono::milliseconds;

namespace {

GroupOptions small() {
  GroupOptions options;
  options.slot_bytes = 4096;
  options.heap_bytes = size_t{8} << 20;
  options.ring_bytes = 4096;
  options.mailbox_bytes = 4096;
  options.timeout = milliseconds(30000);
  options.name = "test";
  return options;
}

Fingerprint step(uint64_t sequence, int64_t count = 1) {
  Fingerprint fingerprint;
  fingerprint.sequence = sequence;
  fingerprint.count = count;
  return fingerprint;
}

void slots_carry_every_round() {
  for (int size : {1, 2, 3, 4}) {
    run_threads(size, [](Bootstrap& bootstrap) {
      const auto group = Group::create(bootstrap, small());
      for (uint64_t round = 1; round <= 300; ++round) {
        std::memset(group->slot(group->rank()), static_cast<int>(round * 7 + group->rank()), group->slot_bytes());
        group->round(step(round), static_cast<int64_t>(round * 64));
        for (int peer = 0; peer < group->size(); ++peer) {
          const auto want = static_cast<std::byte>(round * 7 + peer);
          for (size_t i = 0; i < group->slot_bytes(); i += 511) CHECK(group->peer_slot(peer)[i] == want);
          CHECK_EQUAL(group->peer_heap_offset(peer), static_cast<int64_t>(round * 64));
        }
      }
    });
  }
}

void groups_do_not_mix() {
  run_threads(3, [](Bootstrap& bootstrap) {
    const auto one = Group::create(bootstrap, small());
    const auto two = Group::create(bootstrap, small());
    for (uint64_t round = 1; round <= 50; ++round) {
      *one->slot(one->rank()) = std::byte{1};
      *two->slot(two->rank()) = std::byte{2};
      one->round(step(round));
      two->round(step(round, 2));
      CHECK(*one->peer_slot(1) == std::byte{1} && *two->peer_slot(2) == std::byte{2});
    }
  });
}

void a_mismatch_is_the_same_error_everywhere() {
  std::vector<std::string> errors(3);
  run_threads(3, [&](Bootstrap& bootstrap) {
    GroupOptions options = small();
    options.describe = [](const Fingerprint& f, const std::string&) {
      return "allreduce of " + std::to_string(f.count);
    };
    const auto group = Group::create(bootstrap, options);
    group->round(step(1, 7));
    errors[group->rank()] = error_of([&] { group->round(step(2, group->rank() == 2 ? 9 : 8)); });
    CHECK(error_of([&] { group->round(step(3)); }) == errors[group->rank()]);
  });
  CHECK(errors[0] == errors[1] && errors[1] == errors[2]);
  CHECK_CONTAINS(errors[0], "rank 0 calls allreduce of 8, rank 2 calls allreduce of 9");
  CHECK_CONTAINS(errors[0], "'test'");
}

void abort_frees_waiters() {
  run_threads(3, [](Bootstrap& bootstrap) {
    const auto group = Group::create(bootstrap, small());
    if (group->rank() == 1) {
      group->abort("the reason");
      group->abort("another reason");
    }
    CHECK_CONTAINS(error_of([&] { group->round(step(1)); }), "the reason");
    CHECK(group->aborted());
    CHECK_CONTAINS(error_of([&] { group->check(); }), "the reason");
  });
}

void a_deadline_names_the_missing() {
  run_threads(3, [](Bootstrap& bootstrap) {
    const auto group = Group::create(bootstrap, small());
    group->set_timeout(milliseconds(50));
    if (group->rank() != 1) {
      const std::string error = error_of([&] { group->round(step(5)); });
      CHECK_CONTAINS(error, "rank 1 has not arrived after 50 ms (the timeout of rank ");
      CHECK_CONTAINS(error, "has called nothing yet");
      CHECK_CONTAINS(error, "sequence 5");
    }
    bootstrap.all_gather("");
    CHECK_CONTAINS(error_of([&] { group->round(step(5)); }), "timeout");
  });
}

// One report a stall, long before the timeout; then the group goes on as if nothing had been.
void a_stall_is_reported_once_and_the_group_goes_on() {
  std::vector<std::string> reports;
  run_threads(3, [&](Bootstrap& bootstrap) {
    GroupOptions options = small();
    options.stall_after = milliseconds(100);
    options.describe = [](const Fingerprint& f, const std::string& label) {
      return "call #" + std::to_string(f.sequence) + " (" + label + ")";
    };
    std::promise<void> came;
    std::future<void> reported = came.get_future();
    if (bootstrap.rank() == 0) {
      options.warn = [&](const std::string& report) {
        reports.push_back(report);
        if (reports.size() == 1) came.set_value();
      };
    } else {
      options.warn = [](const std::string&) {};
    }
    const auto group = Group::create(bootstrap, options);
    group->round(step(6));
    group->set_label("bucket 5");
    // Rank 1 comes to the next round only when rank 0 has complained.
    if (group->rank() == 0) {
      std::thread waiting([&] { group->round(step(7)); });
      reported.wait();
      bootstrap.all_gather("");
      waiting.join();
    } else if (group->rank() == 1) {
      bootstrap.all_gather("");
      group->round(step(7));
    } else {
      std::thread waiting([&] { group->round(step(7)); });
      bootstrap.all_gather("");
      waiting.join();
    }
    for (uint64_t round = 8; round < 20; ++round) group->round(step(round));
  });
  CHECK_EQUAL(reports.size(), size_t{2});
  CHECK_CONTAINS(reports[0], "group 'test', rank 0: call #7 (bucket 5): rank 1 has not arrived after ");
  CHECK_CONTAINS(reports[0], "rank 1 last called call #6 ()");
  CHECK_CONTAINS(reports[1], "call #7 (bucket 5) goes on after ");
}

void who_has_left_is_not_waited_for() {
  run_threads(3, [](Bootstrap& bootstrap) {
    const auto group = Group::create(bootstrap, small());
    group->round(step(1));
    if (group->rank() == 2) return;
    CHECK_CONTAINS(error_of([&] { group->round(step(2)); }), "rank 2 left the group while rank ");
  });
}

void who_leaves_by_an_error_tells_it() {
  const auto error_after = [](const std::string& first, const std::string& second) {
    std::string error;
    run_threads(3, [&](Bootstrap& bootstrap) {
      const auto group = Group::create(bootstrap, small());
      group->round(step(1));
      if (group->rank() != 0) group->leave(group->rank() == 1 ? first : second);
      bootstrap.all_gather("");  // both have left
      if (group->rank() == 0) error = error_of([&] { group->round(step(2)); });
    });
    return error;
  };
  CHECK_CONTAINS(error_after("ValueError: one", ""),
                 "ranks 1, 2 left the group (rank 1: ValueError: one) while rank 0");
  CHECK_CONTAINS(error_after("E", "F"), "ranks 1, 2 left the group (rank 1: E; rank 2: F) while rank 0");
  CHECK_CONTAINS(error_after(std::string(1000, 'x'), ""),
                 "(rank 1: " + std::string(kFarewellBytes - 1, 'x') + ") while");
}

void creation_fails_on_all_ranks_alike() {
  run_threads(2, [](Bootstrap& bootstrap) {
    GroupOptions options = small();
    options.heap_bytes = size_t{1} << 60;
    const std::string error = error_of([&] { Group::create(bootstrap, options); });
    CHECK_CONTAINS(error, "rank 0 cannot take part");
    CHECK_CONTAINS(error, "TORCHTP_HEAP_BYTES");
  });
}

void announced_heap_offsets_are_checked() {
  run_threads(2, [](Bootstrap& bootstrap) {
    const auto group = Group::create(bootstrap, small());
    const auto heap_bytes = static_cast<int64_t>(group->heap_bytes());
    const int64_t offsets[] = {heap_bytes - 64, heap_bytes + 1, -5};
    for (uint64_t i = 0; i < 3; ++i) group->round(step(i), group->rank() == 0 ? offsets[i] : -1);
    CHECK_EQUAL(group->peer_heap_offset(0), int64_t{-1});
    group->round(step(4), group->rank() == 0 ? heap_bytes - 64 : -1);
    CHECK(group->peer_heap(0, 64) == group->heap(0) + heap_bytes - 64);
    CHECK_CONTAINS(error_of([&] { group->peer_heap(0, 65); }), "rank 0 announced no 65 bytes");
    CHECK_CONTAINS(error_of([&] { group->peer_heap(1, 1); }), "rank 1 announced no");
    group->round(step(5));
  });
}

void peers_see_what_lies_in_a_heap() {
  run_threads(3, [](Bootstrap& bootstrap) {
    const auto group = Group::create(bootstrap, small());
    constexpr size_t kBytes = 300'000;
    std::byte* const mine = group->allocate(kBytes);
    for (uint64_t round = 0; round < 20; ++round) {
      std::memset(mine, static_cast<int>(round + 40 * group->rank()), kBytes);
      group->round(step(2 * round), group->heap_offset(mine, kBytes));
      for (int peer = 0; peer < group->size(); ++peer) {
        const std::byte* const theirs = group->peer_heap(peer, kBytes);
        CHECK(theirs[0] == static_cast<std::byte>(round + 40 * peer) && theirs[kBytes - 1] == theirs[0]);
      }
      group->round(step(2 * round + 1));
    }
    group->free(mine);
    CHECK_EQUAL(group->allocated_bytes(), size_t{0});
  });
}

void heap_blocks_are_apart_and_come_back() {
  run_threads(1, [](Bootstrap& bootstrap) {
    const auto group = Group::create(bootstrap, small());
    std::mt19937 random(1);
    std::vector<std::pair<std::byte*, size_t>> blocks;
    for (int i = 0; i < 3000; ++i) {
      if (blocks.size() < 40 && random() % 2) {
        const size_t bytes = random() % 8 ? random() % 5000 : random() % 200'000;
        std::byte* const block = group->allocate(bytes);
        CHECK(reinterpret_cast<uintptr_t>(block) % (bytes >= 65536 ? 4096 : 64) == 0);
        CHECK(group->owns(block, bytes) && !group->owns(&random, 1));
        std::memset(block, static_cast<int>(blocks.size()), bytes);
        for (auto& [other, size] : blocks) CHECK(block + bytes <= other || other + size <= block);
        blocks.emplace_back(block, bytes);
      } else if (!blocks.empty()) {
        std::swap(blocks[random() % blocks.size()], blocks.back());
        group->free(blocks.back().first);
        blocks.pop_back();
      }
    }
    for (auto& [block, bytes] : blocks) group->free(block);
    CHECK_EQUAL(group->allocated_bytes(), size_t{0});
    std::byte* const all = group->allocate(group->heap_bytes());
    CHECK(all == group->heap(0));
    CHECK_CONTAINS(error_of([&] { group->allocate(1); }), "TORCHTP_HEAP_BYTES");
    CHECK(!group->owns(all + 1, group->heap_bytes()));
    group->free(all);
    CHECK_CONTAINS(error_of([&] { group->free(all); }), "was not allocated");
  });
}

void freed_pages_go_back() {
  run_threads(1, [](Bootstrap& bootstrap) {
    GroupOptions options = small();
    options.heap_bytes = size_t{1} << 30;
    const auto group = Group::create(bootstrap, options);
    constexpr size_t kBytes = size_t{100} << 20;
    std::byte* const block = group->allocate(kBytes);
    std::memset(block, 1, kBytes);
    group->free(block);
    CHECK(group->allocate(kBytes) == block);
    CHECK(block[0] == std::byte{0} && block[kBytes - 1] == std::byte{0});
    group->free(block);
  });
}

void the_environment_sizes_heaps() {
  GroupOptions options = small();
  options.heap_bytes = 0;
  setenv("TORCHTP_HEAP_BYTES", "1000000", 1);
  run_threads(2, [&](Bootstrap& bootstrap) {
    CHECK_EQUAL(Group::create(bootstrap, options)->heap_bytes(), size_t{1'003'520});  // whole pages
  });
  for (const char* const absurd : {"1G", "", "100", "-1", "9223372036854771712", "99999999999999999999999"}) {
    setenv("TORCHTP_HEAP_BYTES", absurd, 1);
    run_threads(2, [&](Bootstrap& bootstrap) {
      const std::string error = error_of([&] { Group::create(bootstrap, options); });
      CHECK_CONTAINS(error, std::string("must be a number of bytes from 4096 to 1099511627776, not '") + absurd);
    });
  }
  unsetenv("TORCHTP_HEAP_BYTES");
}

void host_identity_is_stable() {
  const std::string identity = host_identity();
  CHECK_EQUAL(identity, host_identity());
  CHECK(identity.size() > 20 && identity.find_first_of(" /") == std::string::npos);
}

}  // namespace

int main() {
  return torchtp::test::run({
      {"slots carry every round", slots_carry_every_round},
      {"groups do not mix", groups_do_not_mix},
      {"a mismatch is the same error everywhere", a_mismatch_is_the_same_error_everywhere},
      {"abort frees waiters", abort_frees_waiters},
      {"a deadline names the missing", a_deadline_names_the_missing},
      {"a stall is reported once and the group goes on", a_stall_is_reported_once_and_the_group_goes_on},
      {"who has left is not waited for", who_has_left_is_not_waited_for},
      {"who leaves by an error tells it", who_leaves_by_an_error_tells_it},
      {"creation fails on all ranks alike", creation_fails_on_all_ranks_alike},
      {"announced heap offsets are checked", announced_heap_offsets_are_checked},
      {"peers see what lies in a heap", peers_see_what_lies_in_a_heap},
      {"heap blocks are apart and come back", heap_blocks_are_apart_and_come_back},
      {"freed pages go back", freed_pages_go_back},
      {"the environment sizes heaps", the_environment_sizes_heaps},
      {"host identity is stable", host_identity_is_stable},
  });
}
