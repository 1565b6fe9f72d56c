// A rank that waits for another with something that is no call of their group: both hear of it.

#include "shm/outside_wait.h"

#include <unistd.h>

#include "check.h"
#include "processes.h"
#include "shm/group.h"
#include "shm/whereabouts.h"

using torchtp::test::error_of;
using torchtp::test::run_processes;
using namespace torchtp::shm;
using std::chrono::milliseconds;

namespace {

std::shared_ptr<Group> make_group(Bootstrap& bootstrap, milliseconds deadlock_after) {
  GroupOptions options;
  options.slot_bytes = options.ring_bytes = options.mailbox_bytes = 4096;
  options.heap_bytes = size_t{1} << 20;
  options.timeout = std::chrono::seconds(40);
  options.name = "all";
  options.warn = [](const std::string&) {};
  options.whereabouts = std::make_shared<Whereabouts>();
  options.deadlock_after = deadlock_after;
  return Group::create(bootstrap, options);
}

std::string fault_of(OutsideWait& wait) {
  for (;;) {
    if (std::string fault = wait.look(); !fault.empty()) return fault;
    usleep(1000);
  }
}

void a_rank_that_waits_outside_for_one_that_waits_for_it_in_a_call() {
  run_processes(2, [&](Bootstrap& bootstrap) {
    const auto group = make_group(bootstrap, milliseconds(200));
    if (bootstrap.rank() == 0) {
      OutsideWait wait(group, 1, "new_group 'b' (2 ranks)");
      const std::string fault = fault_of(wait);
      CHECK_CONTAINS(fault, "new_group 'b' (2 ranks): rank 1 has not arrived after ");
      CHECK_CONTAINS(fault, "rank 0 has not arrived there");
      CHECK_CONTAINS(fault, "that is a deadlock");
    } else {
      const std::string error = error_of([&] { group->round(Fingerprint{}); });
      CHECK_CONTAINS(error, "rank 0 has been in new_group 'b' (2 ranks) for ");
      CHECK_CONTAINS(error, "that is a deadlock");
    }
    bootstrap.all_gather("");
  });
}

void a_rank_that_comes_late_is_in_no_deadlock() {
  run_processes(2, [&](Bootstrap& bootstrap) {
    const auto group = make_group(bootstrap, milliseconds(1));
    if (bootstrap.rank() == 0) {
      {
        OutsideWait wait(group, 1, "new_group");
        for (int i = 0; i < 3; ++i) {
          usleep(60'000);  // longer than between two looks at the other process
          CHECK(wait.look().empty());
        }
        CHECK_CONTAINS(wait.describe(), "new_group: rank 1 has not arrived after ");
        wait.end();
      }
      bootstrap.all_gather("");
      group->round(Fingerprint{});
      return;
    }
    bootstrap.all_gather("");
    CHECK(group->waits_of(0).empty());
    group->round(Fingerprint{});
  });
}

}  // namespace

int main() {
  return torchtp::test::run({
      {"a rank that waits outside for one that waits for it in a call",
       a_rank_that_waits_outside_for_one_that_waits_for_it_in_a_call},
      {"a rank that comes late is in no deadlock", a_rank_that_comes_late_is_in_no_deadlock},
  });
}
