// How a rank of a group waits: spin a little, yield, then sleep on the bell; and what it looks for meanwhile.
#include <sched.h>

#include <cstdio>

#include "core/deadline.h"
#include "core/format.h"
#include "core/process.h"
#include "shm/group.h"
#include "shm/liveness.h"
#include "shm/protocol.h"
#include "shm/segment.h"
#include "shm/stall.h"
#include "shm/whereabouts.h"

namespace torchtp::shm {

namespace {

using std::chrono::milliseconds;
using std::chrono::nanoseconds;

constexpr int kFewSpins = 100;  // some 2.5 us
// So often who gives way sleeps instead: who is woken is put on an idle core, who only yields stays where it is.
constexpr uint32_t kCrowdedWaits = 16;
constexpr auto kYieldTime = milliseconds(1);
constexpr auto kFirstNap = milliseconds(2);
constexpr auto kLongWait = milliseconds(100);   // is told to the peers, of all groups
constexpr auto kLongestNap = milliseconds(25);  // a death is noticed so soon at the latest
constexpr auto kStopped = milliseconds(1000);   // who comes back from a nap so late did not run meanwhile

// Tells the processor that this is a spinning loop.
void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

int first_rank(uint64_t mask) { return __builtin_ctzll(mask); }

}  // namespace

void Group::wait(Channel channel, Awaited& awaited) {
  for (int i = 0; i < spins_; ++i) {
    if (awaited.ready()) return;
    if (i == kFewSpins && keeps_from_running(awaited)) {
      if (++crowded_waits_ % kCrowdedWaits == 0) return nap_until_ready(channel, awaited);
      break;
    }
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

// Whether a rank that is waited for runs, or would, on this very core: schedulers leave two ranks on one core for
// seconds while another core idles. A message there and back takes 48 us then if both spin, 6 if they give way.
bool Group::keeps_from_running(Awaited& awaited) const {
  const auto core = static_cast<uint32_t>(sched_getcpu() + 1);
  auto& ranks = segment_->control().ranks;
  ranks[rank_].core.store(core, std::memory_order_relaxed);
  const uint64_t missing = awaited.missing();
  for (int r = 0; r < size_; ++r) {
    if ((missing >> r & 1) != 0 && core != 0 && ranks[r].core.load(std::memory_order_relaxed) == core) return true;
  }
  return false;
}

bool Group::is_blocked(Channel channel, Awaited& awaited) const {
  const bool first_waits = on_main_thread() || (channel == Channel::kRound && first_thread_waits_.load());
  return first_waits && awaited.needs_all_missing() && !may_come_by_thread(awaited.missing());
}

void Group::note_caller() {
  thread_local const bool is_first = on_main_thread();
  if (!is_first) segment_->control().ranks[rank_].threads.store(1, std::memory_order_relaxed);
}

bool Group::may_come_by_thread(uint64_t ranks) const {
  for (int rank = 0; rank < size_; ++rank) {
    const auto& threads = segment_->control().ranks[rank].threads;
    if ((ranks >> rank & 1) != 0 && threads.load(std::memory_order_relaxed) != 0) return true;
  }
  return false;
}

void Group::nap_until_ready(Channel channel, Awaited& awaited) {
  const milliseconds limit = channel == Channel::kRound ? round_timeout() : timeout();
  Deadline deadline(limit);
  const nanoseconds patience = std::min<nanoseconds>(options_.stall_after, limit / 2);
  Stall stall = begin_stall();
  LongWait long_wait(options_.whereabouts, *this);
  const auto tell = [&](bool blocked) {
    const uint64_t missing = awaited.missing();
    if (long_wait.tells(missing, blocked)) return;
    Whereabouts::Wait wait{awaited.describe(), "", missing, blocked};
    if (channel == Channel::kRound && missing != 0) wait.missing = rank_list(missing, options_.called);
    long_wait.tell(std::move(wait));
  };
  bool reported = false;
  Deadline next_signals(kBetweenSignals);
  nanoseconds longest = kFirstNap / 2;
  auto naps_since = Deadline::Clock::now();
  const auto look = [&] {
    // A job that is stopped as a whole (SIGSTOP) and continued goes on: nobody could come meanwhile.
    const auto away = Deadline::Clock::now() - naps_since;
    if (away > kStopped) deadline.put_off(away - kStopped);
    look_for_trouble(awaited);
    const bool blocked = is_blocked(channel, awaited);
    stall.look(awaited, blocked);
    if (options_.whereabouts && stall.age() >= std::min<nanoseconds>(kLongWait, patience / 2)) tell(blocked);
    if (deadline.passed()) fail(stall.describe(awaited, in_words_of_timeout(limit)));
    if (stall.is_deadlock()) {
      fail(stall.describe(awaited, cat(in_words(stall.age()), " (the timeout is ", in_words(limit), ")")));
    }
    if (!reported && stall.age() >= patience) {
      reported = true;
      report(stall.describe(awaited, in_words(stall.age())));
    }
    longest = std::min<nanoseconds>(2 * longest, kLongestNap);
    const nanoseconds nap = std::min(longest, deadline.left());
    const bool handles = next_signals.passed();
    if (handles) {  // last: a handler may take its time
      handle_signals([&] { return awaited.describe(); });
      next_signals = Deadline(kBetweenSignals);
    }
    naps_since = Deadline::Clock::now();
    return handles ? std::min<nanoseconds>(nap, kFirstNap) : nap;
  };
  protocol_->sleep_until(channel, [&] { return awaited.ready(); }, look);
  long_wait.end();
  if (reported) report(cat(awaited.describe(), " goes on after ", in_words(stall.age())));
}

Stall Group::begin_stall() const {
  return Stall(
      *liveness_, options_.called, rank_, [this](int rank) { return waits_of(rank); },
      [this](uint64_t missing, Circle& circle) {
        return options_.whereabouts && options_.whereabouts->follow(*this, missing, circle);
      },
      options_.deadlock_after);
}

std::string Group::in_words_of_timeout(milliseconds limit) const {
  return cat(in_words(limit), " (the timeout of rank ", called(rank_), ")");
}

void Group::look_after(Awaited& awaited, nanoseconds waited) {
  look_for_trouble(awaited);
  const milliseconds limit = timeout();
  if (waited < limit) return;
  Stall stall = begin_stall();
  stall.look(awaited, false);
  fail(stall.describe(awaited, in_words_of_timeout(limit)));
}

void Group::handle_signals(const std::function<std::string()>& where) {
  if (!options_.handle_signals) return;
  try {
    options_.handle_signals();
  } catch (const std::exception& error) {
    abort(
        cat("rank ", called(rank_), " was interrupted by a signal (", error.what(), ") while it waited in ", where()));
    throw;
  }
}

FirstThreadWaits::FirstThreadWaits(std::shared_ptr<Group> group)
    : group_(on_main_thread() ? std::move(group) : nullptr) {
  if (group_) group_->first_thread_waits_ = true;
}

FirstThreadWaits::~FirstThreadWaits() {
  if (group_) group_->first_thread_waits_ = false;
}

void Group::report(const std::string& what) const {
  const std::string line = cat("[torchtp] ", title(), ", rank ", called(rank_), ": ", what);
  if (options_.warn) return options_.warn(line);
  std::fputs((line + "\n").c_str(), stderr);
}

void Group::look_for_trouble(Awaited& awaited) {
  check();
  Gone gone = protocol_->gone([&](int peer) { return liveness_->is_dead(peer); });
  if (gone.dead != 0) {
    fail(cat("rank ", called(first_rank(gone.dead)), " died (its process is gone) while rank ", called(rank_),
             " waited in ", awaited.describe()));
  }
  if (gone.left == 0 || awaited.ready()) return;
  if (awaited.is_hopeless(gone.left)) {
    gone.left &= awaited.missing();
    fail(cat(rank_list(gone.left, options_.called), " left the group", in_brackets(farewells(gone.left)),
             " while rank ", called(rank_), " waited in ", awaited.describe()));
  }
}

// The errors by which these ranks left.
std::string Group::farewells(uint64_t ranks) const {
  const bool alone = (ranks & (ranks - 1)) == 0;
  std::string all;
  for (int rank = 0; rank < size_; ++rank) {
    const std::string why = (ranks >> rank & 1) != 0 ? protocol_->farewell(rank) : "";
    if (!why.empty()) all += cat(all.empty() ? "" : "; ", alone ? "" : cat("rank ", called(rank), ": "), why);
  }
  return all;
}

}  // namespace torchtp::shm
