// How a rank of a group waits: spin a little, yield, then sleep on the bell; and what it looks for meanwhile.
#include <sched.h>

#include <cstdio>

#include "core/deadline.h"
#include "core/format.h"
#include "shm/bell.h"
#include "shm/group.h"
#include "shm/liveness.h"
#include "shm/segment.h"
#include "shm/stall.h"

namespace torchtp::shm {

namespace {

using std::chrono::milliseconds;
using std::chrono::nanoseconds;

constexpr auto kYieldTime = milliseconds(1);
constexpr auto kFirstNap = milliseconds(2);
constexpr auto kLongestNap = milliseconds(25);  // a death is noticed so soon at the latest

}  // namespace

void Group::wait(Channel channel, Awaited& awaited) {
  for (int i = 0; i < spins_; ++i) {
    if (awaited.ready()) return;
    pause_briefly();
  }
  const Deadline end_of_yielding(kYieldTime);
  do {
    if (awaited.ready()) return;
    check();
    sched_yield();
  } while (!end_of_yielding.passed());
  nap_until_ready(channel, awaited);
}

void Group::nap_until_ready(Channel channel, Awaited& awaited) {
  const milliseconds limit = timeout();
  const Deadline deadline(limit);
  const nanoseconds patience = std::min<nanoseconds>(options_.stall_after, limit / 2);
  Stall stall(*liveness_, options_.called);
  bool reported = false;
  Bell& bell = segment_->control().ranks[rank_].bells[static_cast<int>(channel)];
  for (nanoseconds longest = kFirstNap;; longest = std::min<nanoseconds>(2 * longest, kLongestNap)) {
    Nap nap(bell);
    if (awaited.ready()) break;
    look_for_trouble(awaited);
    stall.look(awaited);
    if (deadline.passed()) {
      fail(stall.describe(awaited, cat(in_words(limit), " (the timeout of rank ", called(rank_), ")")));
    }
    if (!reported && stall.age() >= patience) {
      reported = true;
      report(stall.describe(awaited, in_words(stall.age())));
    }
    nap.sleep(std::min(longest, deadline.left()));
  }
  if (reported) report(cat(awaited.describe(), " goes on after ", in_words(stall.age())));
}

void Group::report(const std::string& what) const {
  const std::string line = cat("[torchtp] group '", name(), "', rank ", called(rank_), ": ", what);
  if (options_.warn) return options_.warn(line);
  std::fputs((line + "\n").c_str(), stderr);
}

void Group::look_for_trouble(Awaited& awaited) {
  check();
  const Control& control = segment_->control();
  uint64_t left = 0;
  for (int peer = 0; peer < size_; ++peer) {
    // In this order: who leaves says so before its process ends.
    const bool dead = liveness_->is_dead(peer);
    if (control.ranks[peer].left.load() != 0) {
      left |= uint64_t{1} << peer;
    } else if (dead) {
      fail(cat("rank ", called(peer), " died (its process is gone) while rank ", called(rank_), " waited in ",
               awaited.describe()));
    }
  }
  if (left == 0 || awaited.ready()) return;
  if (awaited.is_hopeless(left)) {
    left &= awaited.missing();
    fail(cat(rank_list(left, options_.called), " left the group while rank ", called(rank_), " waited in ",
             awaited.describe()));
  }
}

}  // namespace torchtp::shm
