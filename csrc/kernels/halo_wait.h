#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "kernels/atomics.h"

// How ranks that share memory wait for each other, and what becomes of it when one does not come.
namespace torchtp::kernels {

enum class HaloTrouble : uint32_t { kNone, kDeadline, kMismatch, kLeft, kLayout };

// Why an exchange stopped, as the host reads it: written once, `ready` last.
struct HaloFault {
  uint64_t ready = 0;
  uint32_t trouble = 0, rank = 0, peer = 0;  // who found it, and with whom
  uint64_t ticket = 0;
  uint64_t expected_bytes = 0, sent_bytes = 0, sent_ticket = 0;
};

// The words at the start of every rank's arena. A line each: others write some of them.
struct alignas(64) HaloWord {
  uint64_t value;
};
struct HaloControl {
  HaloWord stop;      // kStopping, then kStopped: some rank found trouble. Written by any rank.
  HaloWord reported;  // this rank's host has been told
  HaloWord done;      // blocks of the running launch that have finished
  HaloFault fault;    // valid once stopped
};
constexpr uint64_t kStopping = 1, kStopped = 2;

// What every kernel of an exchange knows.
struct HaloContext {
  uint32_t rank, size;
  uint64_t deadline_nanoseconds;
  HaloControl* control;        // this rank's
  HaloControl* const* others;  // [size], every rank's as this one sees it
  const HaloWord* left;        // [size]: rank r has left the group
  HaloFault* fault;            // memory of the host
};

// Who is waited for, for what.
struct HaloAwaited {
  uint32_t peer;
  uint64_t ticket, num_bytes;
};
// In place of a number of bytes: waits until the peer has taken what it was sent before.
constexpr uint64_t kAwaitsRoom = ~uint64_t{0};

template <typename Atomics>
TORCHTP_HOST_DEVICE void write_fault(HaloFault* to, const HaloFault& fault) {
  to->trouble = fault.trouble;
  to->rank = fault.rank;
  to->peer = fault.peer;
  to->ticket = fault.ticket;
  to->expected_bytes = fault.expected_bytes;
  to->sent_bytes = fault.sent_bytes;
  to->sent_ticket = fault.sent_ticket;
  Atomics::store_release(&to->ready, 1);
}

// Whether some rank found trouble, which this rank's host then knows.
template <typename Atomics>
TORCHTP_HOST_DEVICE bool has_stopped(const HaloContext& context) {
  HaloControl& control = *context.control;
  if (Atomics::load_acquire(&control.stop.value) != kStopped) return false;
  if (Atomics::replace(&control.reported.value, 0, 1)) write_fault<Atomics>(context.fault, control.fault);
  return true;
}

// First cause wins, on every rank for itself.
template <typename Atomics>
TORCHTP_HOST_DEVICE void stop_all(const HaloContext& context, const HaloFault& fault) {
  for (uint32_t rank = 0; rank < context.size; ++rank) {
    HaloControl& other = *context.others[rank];
    if (!Atomics::replace(&other.stop.value, 0, kStopping)) continue;
    write_fault<Atomics>(&other.fault, fault);
    Atomics::store_release(&other.stop.value, kStopped);
  }
  has_stopped<Atomics>(context);
}

// Until the word has reached `least`. False when it will not: the trouble is told to all, and nothing may be touched.
template <typename Atomics>
TORCHTP_HOST_DEVICE bool wait_until(const HaloContext& context, const uint64_t* word, uint64_t least,
                                    const HaloAwaited& awaited) {
  if (Atomics::load_acquire(word) >= least) return true;
  const uint64_t begin = Atomics::nanoseconds();
  HaloTrouble trouble = HaloTrouble::kNone;
  while (true) {
    // Before the word: who leaves has said before that what it had to say.
    const bool left = Atomics::load_acquire(&context.left[awaited.peer].value) != 0;
    if (Atomics::load_acquire(word) >= least) return true;
    if (has_stopped<Atomics>(context)) return false;
    if (left) trouble = HaloTrouble::kLeft;
    // Signed: a device's clock may be set back meanwhile.
    const auto waited = static_cast<int64_t>(Atomics::nanoseconds() - begin);
    if (waited > static_cast<int64_t>(context.deadline_nanoseconds)) trouble = HaloTrouble::kDeadline;
    if (trouble != HaloTrouble::kNone) break;
    Atomics::pause();
  }
  HaloFault fault;
  fault.trouble = static_cast<uint32_t>(trouble);
  fault.rank = context.rank;
  fault.peer = awaited.peer;
  fault.ticket = awaited.ticket;
  fault.expected_bytes = awaited.num_bytes;
  stop_all<Atomics>(context, fault);
  return false;
}

}  // namespace torchtp::kernels
