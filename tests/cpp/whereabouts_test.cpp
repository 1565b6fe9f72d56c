// Who is missing in one group because it waits in another: what the others of the one group say of it.

#include "shm/whereabouts.h"

#include <csignal>
#include <fstream>
#include <iterator>
#include <map>

#include "check.h"
#include "core/format.h"
#include "exchange/shm_exchange.h"
#include "processes.h"
#include "shm/group.h"
#include "shm/mailbox.h"

using torchtp::Fd;
using torchtp::Mapping;
using torchtp::test::error_of;
using torchtp::test::ProcessBootstrap;
using torchtp::test::run_processes;
using namespace torchtp::shm;
using std::chrono::milliseconds;

namespace {

// Memory that the ranks of a test map beside their groups: who has reported, and a bootstrap for some of them.
class Beside {
 public:
  explicit Beside(int most_ranks)
      : file_(sized(Fd::memory("beside"), kFlags + most_ranks * sizeof(ProcessBootstrap::Page))),
        mapping_(file_, kFlags + most_ranks * sizeof(ProcessBootstrap::Page)) {}

  void say(int what) { flag(what) = 1; }
  void await(int what) {
    while (flag(what) == 0) usleep(1000);
  }
  // Of the ranks whose pages begin with the one given.
  ProcessBootstrap bootstrap(int rank, int size, int first_page = 0) {
    return {mapping_.data() + kFlags + first_page * sizeof(ProcessBootstrap::Page), rank, size};
  }

 private:
  static constexpr size_t kFlags = 4096;
  static Fd sized(Fd file, size_t num_bytes) {
    CHECK(ftruncate(file.get(), static_cast<off_t>(num_bytes)) == 0);
    return file;
  }
  std::atomic<int>& flag(int what) { return reinterpret_cast<std::atomic<int>*>(mapping_.data())[what]; }

  const Fd file_;
  const Mapping mapping_;
};

GroupOptions options(const std::string& name, const std::shared_ptr<Whereabouts>& whereabouts,
                     const std::function<void(const std::string&)>& warn) {
  GroupOptions options;
  options.slot_bytes = options.ring_bytes = options.mailbox_bytes = 4096;
  options.heap_bytes = size_t{1} << 20;
  options.timeout = std::chrono::seconds(40);
  options.stall_after = milliseconds(120);
  options.name = name;
  options.describe = [](const Fingerprint& f, const std::string&) { return "call #" + std::to_string(f.sequence); };
  options.warn = warn;
  options.whereabouts = whereabouts;
  return options;
}

Fingerprint step(uint64_t sequence) {
  Fingerprint fingerprint;
  fingerprint.sequence = sequence;
  return fingerprint;
}

void check_lacks(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) throw std::runtime_error("'" + part + "' is in: " + text);
}

bool is_stopped(int pid) {
  std::ifstream file(torchtp::cat("/proc/", pid, "/stat"));
  const std::string text((std::istreambuf_iterator<char>(file)), {});
  return text.find(") T ") != std::string::npos;
}

// Rank 1 waits in a group with rank 2 for that one, which waits for it in the group of all three: none but another
// thread can end that, and here one does.
void a_rank_that_waits_in_another_group_is_told_of() {
  Beside beside(2);
  enum { kOneWaits, kZeroReported, kTwoReported };
  run_processes(3, [&](Bootstrap& bootstrap) {
    const int rank = bootstrap.rank();
    const auto whereabouts = std::make_shared<Whereabouts>();
    std::string report;
    const auto all = Group::create(bootstrap, options("all", whereabouts, [&](const std::string& text) {
                                     if (report.empty()) report = text;
                                     if (rank != 1) beside.say(rank == 0 ? kZeroReported : kTwoReported);
                                   }));
    all->round(step(1));
    if (rank == 0) {
      beside.await(kOneWaits);
      all->round(step(2));
      CHECK_CONTAINS(report, "'all', rank 0: call #2: rank 1 has not arrived after ");
      CHECK_CONTAINS(report, "rank 1 has been in call #7 of group 'pair' for ");
      CHECK_CONTAINS(report, " (rank 0 has not arrived there) and last called call #1");
      check_lacks(report, "deadlock");
      return;
    }
    // In the other order than in the group of all.
    ProcessBootstrap among = beside.bootstrap(2 - rank, 2);
    const auto pair =
        Group::create(among, options("pair", whereabouts, [&](const std::string&) { beside.say(kOneWaits); }));
    if (rank == 1) {
      pair->round(step(7));
      all->round(step(2));
      return;
    }
    beside.await(kOneWaits);
    std::thread another([&] {
      beside.await(kZeroReported);
      beside.await(kTwoReported);
      pair->round(step(7));
    });
    all->round(step(2));
    another.join();
    CHECK_CONTAINS(report, "rank 1 has been in call #7 of group 'pair' for ");
    CHECK_CONTAINS(report, "; rank 1 waits there for rank 2, which waits here: ");
    CHECK_CONTAINS(report, "deadlock");
  });
}

// On another thread than the first one, the first one may still come.
void a_wait_of_another_thread_is_no_deadlock() {
  Beside beside(0);
  enum { kOneWaits, kZeroReported };
  run_processes(2, [&](Bootstrap& bootstrap) {
    const auto whereabouts = std::make_shared<Whereabouts>();
    std::string report;
    const auto one = Group::create(bootstrap, options("one", whereabouts, [&](const std::string& text) {
                                     if (report.empty()) report = text;
                                     beside.say(kZeroReported);
                                   }));
    const auto other =
        Group::create(bootstrap, options("other", whereabouts, [&](const std::string&) { beside.say(kOneWaits); }));
    if (bootstrap.rank() == 0) {
      beside.await(kOneWaits);
      one->round(step(1));
      other->round(step(1));
      CHECK_CONTAINS(report, "has been in call #1 of group 'other' for ");
      check_lacks(report, "deadlock");
      return;
    }
    std::thread worker([&] { other->round(step(1)); });
    beside.await(kZeroReported);
    one->round(step(1));
    worker.join();
  });
}

// Halos and messages as well as rounds, here of one group that rank 0 calls on with one of them and rank 1 with a
// round; and rounds that another thread makes for the first one.
void ranks_that_wait_for_each_other_fail_long_before_the_timeout() {
  struct Nowhere : torchtp::exchange::Sink {
    void write(uint32_t, size_t, const std::byte*, size_t) override {}
  };
  enum class Of { kRound, kHalo, kMessage, kWorker };  // what rank 0 waits in
  for (const Of of : {Of::kRound, Of::kHalo, Of::kMessage, Of::kWorker}) {
    const bool one_group = of == Of::kHalo || of == Of::kMessage;
    run_processes(2, [&](Bootstrap& bootstrap) {
      const auto whereabouts = std::make_shared<Whereabouts>();
      const auto make = [&](const std::string& name) {
        GroupOptions given = options(name, whereabouts, [](const std::string&) {});
        given.deadlock_after = milliseconds(200);
        return Group::create(bootstrap, given);
      };
      const auto one = make("one"), other = make("other");
      std::string error;
      if (bootstrap.rank() == 1) {
        error = error_of([&] { (one_group ? one : other)->round(step(1)); });
        CHECK_CONTAINS(error, "call #1");
      } else if (of == Of::kMessage) {
        // The first bytes go, the others find no room.
        std::vector<char> bytes(size_t{1} << 16);
        error = error_of([&] { Mailbox(one).send(1, 5, bytes.data(), bytes.size()); });
        CHECK_CONTAINS(error, "call #1");
      } else if (of == Of::kHalo) {
        torchtp::exchange::ShmExchange exchange(one);
        error = error_of([&] { exchange.finish(exchange.start({}, {{1, 256, std::make_shared<Nowhere>()}})); });
        CHECK_CONTAINS(error, "256 bytes from rank 1");
      } else if (of == Of::kWorker) {
        const FirstThreadWaits wait(one);
        std::thread worker([&] { error = error_of([&] { one->round(step(1)); }); });
        worker.join();
        CHECK_CONTAINS(error, "call #1");
      } else {
        error = error_of([&] { one->round(step(1)); });
        CHECK_CONTAINS(error, "call #1");
      }
      // Of two groups the one fails first, and the other when its rank leaves.
      if (one_group) CHECK_CONTAINS(error, "that is a deadlock");
      check_lacks(error, "the timeout of");
    });
  }
}

// Each waits in a group of two for the next: only the group of all, in which none waits, tells of the whole circle.
void ranks_that_wait_in_a_circle_fail_long_before_the_timeout() {
  constexpr int kRanks = 4;
  Beside beside(2 * kRanks);
  run_processes(kRanks, [&](Bootstrap& bootstrap) {
    const int rank = bootstrap.rank();
    const auto whereabouts = std::make_shared<Whereabouts>();
    const auto all = Group::create(bootstrap, options("all", whereabouts, [](const std::string&) {}));
    std::shared_ptr<Group> with_next;
    std::vector<std::shared_ptr<Group>> pairs;
    for (int first = 0; first < kRanks; ++first) {
      const bool is_first = rank == first;
      if (!is_first && rank != (first + 1) % kRanks) continue;
      GroupOptions given = options(torchtp::cat("pair ", first), whereabouts, [](const std::string&) {});
      given.deadlock_after = milliseconds(200);
      ProcessBootstrap among = beside.bootstrap(is_first ? 1 : 0, 2, 2 * first);
      pairs.push_back(Group::create(among, given));
      if (is_first) with_next = pairs.back();
    }
    const std::string error = error_of([&] { with_next->round(step(rank)); });
    check_lacks(error, "the timeout of");
    // Who fails first tells it, and the others when it leaves.
    std::string words = torchtp::cat("of group 'all' rank ", rank, " waits for rank ", (rank + 1) % kRanks);
    for (int i = 1; i < kRanks; ++i) {
      const int at = (rank + i) % kRanks;
      words += torchtp::cat(", rank ", at, " in call #", at, " of group 'pair ", at, "' for rank ", (at + 1) % kRanks);
    }
    with_next.reset();
    pairs.clear();
    const auto told = bootstrap.all_gather(error.find(words + ": unless ") == std::string::npos ? "" : "circle");
    CHECK(std::count(told.begin(), told.end(), "circle") > 0);
  });
}

// Rank 0 misses 1, which waits for 2, which waits for 0.
void who_fails_in_a_circle_ends_it_unless_it_has_gone_on_for_long() {
  std::map<int, ToldWait> told;
  for (const int rank : {1, 2}) {
    told[rank].since_ns = 10 * rank;
    told[rank].is_blocked = 1;
    told[rank].for_ranks = rank == 1 ? 0b100 : 0b001;
  }
  const auto waits_of = [&](int rank) { return std::vector<ToldWait>{told.at(rank)}; };
  Circle circle;
  circle.links = find_circle(0, 0b010, waits_of);
  CHECK(circle.links.size() == 2);
  for (const bool is_settled : {false, true}) {
    circle.is_settled = is_settled;
    told[2].failed_ns = 0;
    CHECK(goes_on(circle, 0, 0b010, waits_of));
    told[2].failed_ns = 30;
    CHECK(goes_on(circle, 0, 0b010, waits_of) == is_settled);
    CHECK(find_circle(0, 0b010, waits_of).empty());
  }
  told[2].since_ns = 21;  // it has failed, and waits elsewhere
  CHECK(!goes_on(circle, 0, 0b010, waits_of));
}

// What a stopped rank has told may be long past.
void a_rank_that_waits_and_is_stopped_is_in_no_deadlock() {
  Beside beside(0);
  enum { kOneWaits };
  run_processes(2, [&](Bootstrap& bootstrap) {
    const auto whereabouts = std::make_shared<Whereabouts>();
    const auto pids = bootstrap.all_gather(std::to_string(getpid()));
    GroupOptions given = options("test", whereabouts, [&](const std::string&) { beside.say(kOneWaits); });
    given.deadlock_after = milliseconds(1);
    const auto one = Group::create(bootstrap, given), other = Group::create(bootstrap, given);
    if (bootstrap.rank() == 1) {
      error_of([&] { other->round(step(1)); });
      return;
    }
    beside.await(kOneWaits);
    const int pid = std::stoi(pids[1]);
    CHECK(kill(pid, SIGSTOP) == 0);
    while (!is_stopped(pid)) usleep(1000);
    one->set_timeout(milliseconds(300));
    const std::string error = error_of([&] { one->round(step(1)); });
    CHECK(kill(pid, SIGCONT) == 0);
    CHECK_CONTAINS(error, "(the timeout of rank 0)");
  });
}

void a_wait_that_failed_is_told_until_its_group_ends() {
  Beside beside(0);
  enum { kFailed, kEnded };
  for (const bool ends : {false, true}) {
    run_processes(2, [&](Bootstrap& bootstrap) {
      const auto whereabouts = std::make_shared<Whereabouts>();
      const auto quiet = [](const std::string&) {};
      const auto all = Group::create(bootstrap, options("all", whereabouts, quiet));
      auto other = Group::create(bootstrap, options("other", whereabouts, quiet));
      if (bootstrap.rank() == 1) {
        other->set_timeout(milliseconds(200));
        CHECK_CONTAINS(error_of([&] { other->round(step(3)); }), "rank 0 has not arrived");
        if (ends) other.reset();
        beside.say(ends ? kEnded : kFailed);
        bootstrap.all_gather("");
        return;
      }
      beside.await(ends ? kEnded : kFailed);
      all->set_timeout(milliseconds(50));
      const std::string error = error_of([&] { all->round(step(1)); });
      CHECK_CONTAINS(error, "rank 1 has not arrived after 50 ms");
      if (ends) {
        check_lacks(error, "other");
      } else {
        CHECK_CONTAINS(error, "was in call #3 of group 'other' for ");
        CHECK_CONTAINS(error, ", until that failed (rank 0 has not arrived there)");
      }
      bootstrap.all_gather("");
    });
  }
}

// Of any rank, another one's may come first.
void a_rank_that_waits_for_a_message_of_the_same_group_is_told_of() {
  for (const bool from_any : {false, true}) {
    Beside beside(0);
    enum { kOneWaits };
    run_processes(2, [&](Bootstrap& bootstrap) {
      const auto group = Group::create(bootstrap, options("test", std::make_shared<Whereabouts>(),
                                                          [&](const std::string&) { beside.say(kOneWaits); }));
      Mailbox mailbox(group);
      char bytes[3] = {};
      std::string error;
      if (bootstrap.rank() == 1) {
        error = error_of([&] { from_any ? mailbox.recv_any(5, bytes, 3) : (mailbox.recv(0, 5, bytes, 3), 0); });
      } else {
        beside.await(kOneWaits);
        group->set_timeout(milliseconds(50));
        error = error_of([&] { group->round(step(1)); });
      }
      CHECK_CONTAINS(error, "rank 1 has not arrived after 50 ms");
      CHECK_CONTAINS(error, torchtp::cat("has been in recv of 3 bytes with tag 5 from ",
                                         from_any ? "any rank" : "rank 0", " for "));
      if (from_any) {
        check_lacks(error, "deadlock");
      } else {
        CHECK_CONTAINS(error, "; rank 1 waits there for rank 0, which waits here: ");
      }
    });
  }
}

// More waits than there is room for, with names of any length.
void the_oldest_waits_are_told() {
  run_processes(2, [&](Bootstrap& bootstrap) {
    const auto whereabouts = std::make_shared<Whereabouts>();
    const auto quiet = [](const std::string&) {};
    const auto group = Group::create(bootstrap, options("told", whereabouts, quiet));
    const auto other = Group::create(bootstrap, options(std::string(100, 'n'), whereabouts, quiet));
    if (bootstrap.rank() == 0) {
      std::vector<std::unique_ptr<LongWait>> waits;
      for (size_t i = 0; i < kToldWaits + 2; ++i) {
        waits.push_back(std::make_unique<LongWait>(whereabouts, i == 2 ? *other : *group));
        waits.back()->tell({torchtp::cat("wait ", i, std::string(i == 2 ? 300 : 0, 'x')), "", 2, false, 0});
      }
      waits[0]->end();
      waits[1].reset();  // has failed
      bootstrap.all_gather("");
      bootstrap.all_gather("");
      return;
    }
    bootstrap.all_gather("");
    group->set_timeout(milliseconds(5));
    const std::string error = error_of([&] { group->round(step(1)); });
    bootstrap.all_gather("");
    CHECK_CONTAINS(error, "has been in wait 2xxx");
    CHECK_CONTAINS(error, "... of group 'nnn");
    for (int i = 3; i < 6; ++i) CHECK_CONTAINS(error, torchtp::cat("has been in wait ", i, " for "));
    check_lacks(error, "wait 0");
    check_lacks(error, "wait 1");
  });
}

}  // namespace

int main() {
  return torchtp::test::run({
      {"a rank that waits in another group is told of", a_rank_that_waits_in_another_group_is_told_of},
      {"a wait of another thread is no deadlock", a_wait_of_another_thread_is_no_deadlock},
      {"ranks that wait for each other fail long before the timeout",
       ranks_that_wait_for_each_other_fail_long_before_the_timeout},
      {"ranks that wait in a circle fail long before the timeout",
       ranks_that_wait_in_a_circle_fail_long_before_the_timeout},
      {"who fails in a circle ends it unless it has gone on for long",
       who_fails_in_a_circle_ends_it_unless_it_has_gone_on_for_long},
      {"a rank that waits and is stopped is in no deadlock", a_rank_that_waits_and_is_stopped_is_in_no_deadlock},
      {"a wait that failed is told until its group ends", a_wait_that_failed_is_told_until_its_group_ends},
      {"a rank that waits for a message of the same group is told of",
       a_rank_that_waits_for_a_message_of_the_same_group_is_told_of},
      {"the oldest waits are told", the_oldest_waits_are_told},
  });
}
