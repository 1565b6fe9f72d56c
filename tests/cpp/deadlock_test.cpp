// Ranks that wait for one another in several groups, or only seem to.

#include <csignal>
#include <fstream>
#include <future>
#include <iterator>
#include <map>
#include <thread>

#include "beside.h"
#include "core/format.h"
#include "exchange/shm_exchange.h"
#include "shm/mailbox.h"

using torchtp::test::Beside;
using torchtp::test::check_lacks;
using torchtp::test::error_of;
using torchtp::test::options;
using torchtp::test::ProcessBootstrap;
using torchtp::test::run_processes;
using torchtp::test::step;
using namespace torchtp::shm;
using std::chrono::milliseconds;

namespace {

bool is_stopped(int pid) {
  std::ifstream file(torchtp::cat("/proc/", pid, "/stat"));
  const std::string text((std::istreambuf_iterator<char>(file)), {});
  return text.find(") T ") != std::string::npos;
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

// Its first thread waits in one group, and another, which has called in the second group before, comes there late.
void a_rank_that_calls_by_several_threads_is_in_no_deadlock() {
  Beside beside(0);
  enum { kOneReported };
  run_processes(2, [&](Bootstrap& bootstrap) {
    const auto whereabouts = std::make_shared<Whereabouts>();
    const auto make = [&](const std::string& name, const std::function<void(const std::string&)>& warn) {
      GroupOptions given = options(name, whereabouts, warn);
      given.deadlock_after = milliseconds(100);
      given.stall_after = milliseconds(300);  // the report comes when a deadlock would have been found
      return Group::create(bootstrap, given);
    };
    const auto one = make("one", [](const std::string&) {});
    const auto other = make("other", [&](const std::string&) { beside.say(kOneReported); });
    if (bootstrap.rank() == 1) {
      for (int round = 1; round <= 2; ++round) other->round(step(round));
      one->round(step(1));
      return;
    }
    std::promise<void> called;
    std::thread writer([&] {
      other->note_caller();
      other->round(step(1));
      called.set_value();
      beside.await(kOneReported);
      other->round(step(2));
    });
    called.get_future().wait();
    one->note_caller();
    one->round(step(1));
    writer.join();
  });
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

}  // namespace

int main() {
  return torchtp::test::run({
      {"a wait of another thread is no deadlock", a_wait_of_another_thread_is_no_deadlock},
      {"a rank that calls by several threads is in no deadlock",
       a_rank_that_calls_by_several_threads_is_in_no_deadlock},
      {"ranks that wait for each other fail long before the timeout",
       ranks_that_wait_for_each_other_fail_long_before_the_timeout},
      {"ranks that wait in a circle fail long before the timeout",
       ranks_that_wait_in_a_circle_fail_long_before_the_timeout},
      {"who fails in a circle ends it unless it has gone on for long",
       who_fails_in_a_circle_ends_it_unless_it_has_gone_on_for_long},
      {"a rank that waits and is stopped is in no deadlock", a_rank_that_waits_and_is_stopped_is_in_no_deadlock},
  });
}
