// Who is missing in one group because it waits in another: what the others of the one group say of it.

#include "shm/whereabouts.h"

#include <thread>

#include "beside.h"
#include "core/format.h"
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
      {"a wait that failed is told until its group ends", a_wait_that_failed_is_told_until_its_group_ends},
      {"a rank that waits for a message of the same group is told of",
       a_rank_that_waits_for_a_message_of_the_same_group_is_told_of},
      {"the oldest waits are told", the_oldest_waits_are_told},
  });
}
