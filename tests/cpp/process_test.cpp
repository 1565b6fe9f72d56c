// What only processes can show: the segment handed over, ranks that die, stop or fork.

#include "processes.h"

#include <sys/resource.h>

#include <cstring>

#include "check.h"
#include "core/error.h"
#include "exchange/shm_exchange.h"
#include "shm/group.h"
#include "shm/mailbox.h"

using torchtp::test::error_of;
using torchtp::test::run_processes;
using namespace torchtp::shm;
using std::chrono::milliseconds;

namespace {

std::shared_ptr<Group> make(Bootstrap& bootstrap) {
  GroupOptions options;
  options.heap_bytes = size_t{1} << 20;
  options.name = "test";
  return Group::create(bootstrap, options);
}

Fingerprint step(uint64_t sequence) {
  Fingerprint fingerprint;
  fingerprint.sequence = sequence;
  return fingerprint;
}

void rounds_and_heaps_cross_processes() {
  run_processes(3, [](Bootstrap& bootstrap) {
    const auto group = make(bootstrap);
    std::byte* const mine = group->allocate(100'000);
    for (uint64_t round = 1; round <= 200; ++round) {
      *group->slot(group->rank()) = static_cast<std::byte>(round + group->rank());
      std::memset(mine, static_cast<int>(round * 3 + group->rank()), 100'000);
      group->round(step(round), group->heap_offset(mine, 100'000));
      for (int peer = 0; peer < group->size(); ++peer) {
        CHECK(*group->peer_slot(peer) == static_cast<std::byte>(round + peer));
        CHECK(group->peer_heap(peer, 100'000)[99'999] == static_cast<std::byte>(round * 3 + peer));
      }
      group->round(step(round));
    }
  });
}

void default_sizes_work() {
  run_processes(4, [](Bootstrap& bootstrap) {
    const auto group = Group::create(bootstrap, {});
    CHECK(group->heap_bytes() >= (size_t{1} << 30));
    group->round(step(1));
  });
}

void default_sizes_keep_to_the_limits_of_the_process() {
  run_processes(2, [](Bootstrap& bootstrap) {
    const rlimit limit{size_t{1} << 30, size_t{1} << 30};
    CHECK_EQUAL(setrlimit(RLIMIT_FSIZE, &limit), 0);
    const auto group = Group::create(bootstrap, {});
    CHECK_EQUAL(group->heap_bytes(), size_t{64} << 20);
    group->round(step(1));
  });
}

// The rank in the middle dies without a word while the others wait for it in their own ways.
void a_dead_rank_is_named(const std::function<void(Group&)>& wait) {
  run_processes(
      3,
      [&](Bootstrap& bootstrap) {
        const auto group = make(bootstrap);
        group->round(step(1));
        if (group->rank() == 1) raise(SIGKILL);
        const std::string error = error_of([&] { wait(*group); });
        CHECK_CONTAINS(error, "rank 1 died");
        CHECK(error == error_of([&] { group->round(step(2)); }));
      },
      1);
}

void a_dead_rank_is_named_in_a_round() {
  a_dead_rank_is_named([](Group& group) { group.round(step(2)); });
}

void a_dead_rank_is_named_in_an_exchange() {
  a_dead_rank_is_named([](Group& group) {
    torchtp::exchange::ShmExchange exchange(group.shared_from_this());
    exchange.finish(exchange.start({}, {{1, 64, nullptr}}));
  });
}

void a_dead_rank_is_named_in_a_mailbox() {
  a_dead_rank_is_named([](Group& group) {
    Mailbox mailbox(group.shared_from_this());
    char byte;
    if (group.rank() == 0) mailbox.recv(1, 0, &byte, 1);
    mailbox.recv_any(0, &byte, 1);
  });
}

// A data loader's worker inherits every descriptor and lives on.
void a_forked_child_does_not_hide_a_death() {
  run_processes(
      2,
      [](Bootstrap& bootstrap) {
        const auto group = make(bootstrap);
        group->round(step(1));
        pid_t child = 0;
        if (group->rank() == 1) {
          child = fork();
          if (child == 0) {
            pause();
            _exit(0);
          }
        }
        const auto children = bootstrap.all_gather(std::to_string(child));
        if (group->rank() == 1) raise(SIGKILL);
        CHECK_CONTAINS(error_of([&] { group->round(step(2)); }), "rank 1 died");
        CHECK(kill(std::stoi(children[1]), SIGKILL) == 0);
      },
      1);
}

void a_forked_child_is_not_the_rank() {
  run_processes(2, [](Bootstrap& bootstrap) {
    GroupOptions options;
    options.heap_bytes = size_t{256} << 20;
    auto group = Group::create(bootstrap, options);
    constexpr size_t kBytes = size_t{100} << 20;  // so much that freeing gives pages back
    std::byte* const block = group->allocate(kBytes);
    block[kBytes / 2] = std::byte{77};
    const pid_t child = fork();
    if (child == 0) {
      bool refused = false;
      try {
        group->allocate(1);
      } catch (const torchtp::Error&) {
        refused = true;
      }
      group->free(block);
      group.reset();
      _exit(refused ? 0 : 1);
    }
    int status = -1;
    waitpid(child, &status, 0);
    CHECK_EQUAL(status, 0);
    CHECK(block[kBytes / 2] == std::byte{77});
    for (uint64_t round = 1; round <= 10; ++round) group->round(step(round));
  });
}

void a_stopped_rank_is_named_after_the_deadline() {
  run_processes(
      3,
      [](Bootstrap& bootstrap) {
        const auto group = make(bootstrap);
        group->set_timeout(milliseconds(200));
        const auto pids = bootstrap.all_gather(std::to_string(getpid()));
        if (group->rank() == 2) raise(SIGSTOP);
        const std::string error = error_of([&] { group->round(step(1)); });
        CHECK_CONTAINS(error, "timeout of 200 ms");
        CHECK_CONTAINS(error, "rank 2 in round 1");
        if (group->rank() == 0) kill(std::stoi(pids[2]), SIGKILL);
      },
      2);
}

void abort_reaches_other_processes() {
  run_processes(3, [](Bootstrap& bootstrap) {
    const auto group = make(bootstrap);
    if (group->rank() == 0) {
      group->abort("enough");
    } else {
      CHECK_CONTAINS(error_of([&] { group->round(step(1)); }), "'test': enough");
    }
    bootstrap.all_gather("");
  });
}

void who_leaves_and_ends_is_not_dead() {
  run_processes(3, [](Bootstrap& bootstrap) {
    const auto group = make(bootstrap);
    Mailbox mailbox(group);
    if (group->rank() == 2) return;  // ends its process
    char bytes[3] = {1, 2, 3};
    for (int i = 0; i < 50; ++i) {
      if (group->rank() == 0) {
        usleep(1000);  // so that rank 1 looks around while it waits
        mailbox.send(1, i, bytes, 3);
      } else {
        mailbox.recv(0, i, bytes, 3);
      }
    }
    // The first round that fails aborts the group: not before rank 1 is done with it.
    if (group->rank() == 1) return mailbox.send(0, 0, bytes, 3);
    mailbox.recv(1, 0, bytes, 3);
    CHECK_CONTAINS(error_of([&] { group->round(step(1)); }), "left the group");
  });
}

}  // namespace

int main() {
  return torchtp::test::run({
      {"rounds and heaps cross processes", rounds_and_heaps_cross_processes},
      {"default sizes work", default_sizes_work},
      {"default sizes keep to the limits of the process", default_sizes_keep_to_the_limits_of_the_process},
      {"a dead rank is named in a round", a_dead_rank_is_named_in_a_round},
      {"a dead rank is named in an exchange", a_dead_rank_is_named_in_an_exchange},
      {"a dead rank is named in a mailbox", a_dead_rank_is_named_in_a_mailbox},
      {"a forked child does not hide a death", a_forked_child_does_not_hide_a_death},
      {"a forked child is not the rank", a_forked_child_is_not_the_rank},
      {"a stopped rank is named after the deadline", a_stopped_rank_is_named_after_the_deadline},
      {"abort reaches other processes", abort_reaches_other_processes},
      {"who leaves and ends is not dead", who_leaves_and_ends_is_not_dead},
  });
}
