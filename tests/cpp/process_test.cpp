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
        kill(std::stoi(pids[2]), SIGKILL);
        CHECK_CONTAINS(error, "rank 2 has not arrived after 200 ms (the timeout of rank ");
        CHECK_CONTAINS(error, "rank 2 stopped (SIGSTOP) ");
      },
      2);
}

// The others say who was stopped, and go on with it when it is continued.
void a_stopped_rank_is_reported_and_may_come_back() {
  run_processes(3, [](Bootstrap& bootstrap) {
    std::vector<std::string> reports;
    std::function<void()> on_report = [] {};
    GroupOptions options;
    options.heap_bytes = size_t{1} << 20;
    options.stall_after = milliseconds(150);
    options.warn = [&](const std::string& report) {
      reports.push_back(report);
      on_report();
    };
    const auto group = Group::create(bootstrap, options);
    const auto pids = bootstrap.all_gather(std::to_string(getpid()));
    group->round(step(1));
    if (group->rank() == 0) on_report = [&] { kill(std::stoi(pids[2]), SIGCONT); };
    if (group->rank() == 2) raise(SIGSTOP);
    for (uint64_t round = 2; round < 50; ++round) group->round(step(round));
    if (group->rank() == 0) {
      CHECK_CONTAINS(reports.at(0), "rank 2 has not arrived after ");
      CHECK_CONTAINS(reports.at(0), "rank 2 stopped (SIGSTOP) ");
      CHECK_CONTAINS(reports.at(0), " ms ago and last called ");
      CHECK_CONTAINS(reports.at(1), "goes on after ");
    }
  });
}

void a_job_that_is_stopped_for_longer_than_its_timeout_goes_on() {
  run_processes(2, [](Bootstrap& bootstrap) {
    const auto group = make(bootstrap);
    group->set_timeout(milliseconds(2000));
    const auto pids = bootstrap.all_gather(std::to_string(getpid()));
    group->round(step(1));
    if (group->rank() == 0 && fork() == 0) {
      usleep(300'000);
      for (const std::string& pid : pids) kill(std::stoi(pid), SIGSTOP);
      usleep(2'500'000);
      kill(std::stoi(pids[0]), SIGCONT);
      usleep(300'000);
      kill(std::stoi(pids[1]), SIGCONT);
      _exit(0);
    }
    if (group->rank() == 1) usleep(600'000);
    group->round(step(2));
  });
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

// Says something else than the rank itself would, in one step of the creation.
class Altered final : public Bootstrap {
 public:
  using Alter = std::function<std::string(const std::string&)>;

  Altered(Bootstrap& inner, int step, Alter alter) : inner_(inner), step_(step), alter_(std::move(alter)) {}
  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  std::vector<std::string> all_gather(const std::string& mine) override {
    return inner_.all_gather(step_-- == 0 ? alter_(mine) : mine);
  }
  void watch(std::function<bool(int)> has_died) override { inner_.watch(std::move(has_died)); }

 private:
  Bootstrap& inner_;
  int step_;
  Alter alter_;
};

void a_rank_that_dies_while_the_group_is_made_is_named() {
  for (int step = 1; step < 6; ++step) {
    run_processes(
        3,
        [&](Bootstrap& bootstrap) {
          if (bootstrap.rank() != 1) {
            CHECK_CONTAINS(error_of([&] { make(bootstrap); }), "rank 1 died (its process is gone) while the group");
            return;
          }
          Altered dying(bootstrap, step, [](const std::string& text) {
            raise(SIGKILL);
            return text;
          });
          make(dying);
        },
        1);
  }
}

void another_build_is_refused_by_all() {
  const std::vector<Altered::Alter> others = {
      [](const std::string& text) { return text + "x"; },  // a process nobody can look at: harmless
      [](const std::string& text) { return text + "7"; },  // another time than the others read, as in emulators
      [](const std::string& text) { return std::string(text).replace(text.find(' ') - 1, 1, "?"); },
      [](const std::string&) { return std::string("+"); },
      [](const std::string&) { return std::string("+2 4096 4096"); },
      [](const std::string&) { return std::string(1000, 'x'); },
      [](const std::string&) { return std::string(); },
  };
  for (size_t i = 0; i < others.size(); ++i) {
    run_processes(3, [&](Bootstrap& bootstrap) {
      Altered stranger(bootstrap, bootstrap.rank() == 2 ? 0 : -1, others[i]);
      if (i < 2) return make(stranger)->round(step(1));
      const std::string error = error_of([&] { make(stranger); });
      const auto all = bootstrap.all_gather(error);
      CHECK(all[0] == error && all[1] == error && all[2] == error);
      CHECK_CONTAINS(error, i < 5 ? "rank 2 runs another torchtp" : "rank 2 cannot take part");
    });
  }
}

// What only one rank lacks is the error of all.
void a_rank_without_descriptors_or_room_is_named_by_all() {
  const auto fails = [](int resource, rlim_t limit, const std::string& why) {
    run_processes(3, [&](Bootstrap& bootstrap) {
      const rlimit limits{limit, limit};
      if (bootstrap.rank() == (resource == RLIMIT_NOFILE ? 1 : 0)) CHECK_EQUAL(setrlimit(resource, &limits), 0);
      const std::string error = error_of([&] { make(bootstrap); });
      const auto all = bootstrap.all_gather(error);
      CHECK(all[0] == error && all[1] == error && all[2] == error);
      CHECK_CONTAINS(error, " cannot take part in a shared-memory group: ");
      CHECK_CONTAINS(error, why);
    });
  };
  fails(RLIMIT_NOFILE, 3, "Too many open files");
  fails(RLIMIT_FSIZE, 1 << 20, "file size limit");
}

void impossible_sizes_are_refused() {
  for (const char* sizes :
       {"2 4096 4096 4096 4096 ", "3 4096 -4096 4096 4096 ", "3 4095 4096 4096 4096 ",
        "3 4096 4096 4096 9223372036854771712 ", "3 0 4096 4096 4096 ", "3 99999999999999999999999 1 "}) {
    run_processes(3, [&](Bootstrap& bootstrap) {
      Altered liar(bootstrap, bootstrap.rank() == 0 ? 1 : -1,
                   [&](const std::string& text) { return "+" + (sizes + text.substr(text.rfind(' ') + 1)); });
      CHECK_CONTAINS(error_of([&] { make(liar); }), "impossible sizes");
    });
  }
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
      {"a stopped rank is reported and may come back", a_stopped_rank_is_reported_and_may_come_back},
      {"a job that is stopped for longer than its timeout goes on",
       a_job_that_is_stopped_for_longer_than_its_timeout_goes_on},
      {"abort reaches other processes", abort_reaches_other_processes},
      {"a rank that dies while the group is made is named", a_rank_that_dies_while_the_group_is_made_is_named},
      {"another build is refused by all", another_build_is_refused_by_all},
      {"a rank without descriptors or room is named by all", a_rank_without_descriptors_or_room_is_named_by_all},
      {"impossible sizes are refused", impossible_sizes_are_refused},
      {"who leaves and ends is not dead", who_leaves_and_ends_is_not_dead},
  });
}
