#pragma once

#include <chrono>
#include <string>

#include "core/format.h"
#include "kernels/halo_wait.h"

namespace torchtp::exchange {

constexpr std::chrono::milliseconds kLongestTimeout = std::chrono::hours(24 * 365);

// What a fault says, in words; empty if there is none.
inline std::string trouble_of(const kernels::HaloFault& fault, std::chrono::milliseconds timeout) {
  using kernels::HaloTrouble;
  if (kernels::HostAtomics::load_acquire(&fault.ready) == 0) return "";
  const std::string what =
      fault.expected_bytes == kernels::kAwaitsRoom
          ? cat("in exchange ", fault.ticket, " for rank ", fault.peer, " to take what it was sent")
          : cat("in exchange ", fault.ticket, " for ", fault.expected_bytes, " bytes from rank ", fault.peer);
  switch (static_cast<HaloTrouble>(fault.trouble)) {
    case HaloTrouble::kDeadline:
      return cat("timeout of ", timeout.count(), " ms passed on rank ", fault.rank, " while it waited ", what);
    case HaloTrouble::kLeft:
      return cat("rank ", fault.peer, " left the group while rank ", fault.rank, " waited ", what);
    case HaloTrouble::kLayout:
      return cat("rank ", fault.peer, " sent rank ", fault.rank, " rows in another memory format than rank ",
                 fault.rank, " has (exchange #", fault.ticket, "): give all ranks tensors of one memory format");
    default:
      return cat("rank ", fault.rank, " expects ", fault.expected_bytes, " bytes from rank ", fault.peer,
                 " (exchange #", fault.ticket, "), but rank ", fault.peer, " sent ", fault.sent_bytes,
                 " bytes (exchange #", fault.sent_ticket,
                 "): the ranks do not agree on the geometry or on the order of exchanges");
  }
}

}  // namespace torchtp::exchange
