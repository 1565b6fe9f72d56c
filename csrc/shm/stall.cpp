#include "shm/stall.h"

#include <csignal>

#include "core/format.h"

namespace torchtp::shm {

std::string rank_list(uint64_t mask, const std::vector<int>& called) {
  std::string text = (mask & (mask - 1)) == 0 ? "rank" : "ranks";
  for (int rank = 0; rank < kMaxRanks; ++rank) {
    if ((mask >> rank & 1) == 0) continue;
    text += cat(text.back() == 'k' || text.back() == 's' ? " " : ", ", called.empty() ? rank : called[rank]);
  }
  return text;
}

namespace {

constexpr auto kBetweenLooks = std::chrono::milliseconds(50);

const char* name_of(int signal) {
  switch (signal) {
    case SIGSTOP:
      return " (SIGSTOP)";
    case SIGTSTP:
      return " (SIGTSTP)";
    case SIGTTIN:
      return " (SIGTTIN)";
    case SIGTTOU:
      return " (SIGTTOU)";
    default:
      return "";
  }
}

}  // namespace

void Stall::look(Awaited& awaited) {
  const Clock::time_point now = Clock::now();
  if (now - looked_at_ < kBetweenLooks) return;
  looked_at_ = now;
  const uint64_t missing = awaited.missing();
  for (int rank = 0; rank < kMaxRanks; ++rank) {
    if ((missing >> rank & 1) == 0) continue;
    const auto process = liveness_.process(rank);
    const bool stopped = process && process->state == 'T';
    Clock::time_point& at = stopped_at_[rank];
    if (!stopped) at = {};
    if (stopped && at == Clock::time_point{}) at = now;
  }
}

std::string Stall::state_of(int rank) const {
  const auto process = liveness_.process(rank);
  if (!process) return "";
  switch (process->state) {
    case 'T': {
      std::string text = cat("stopped", name_of(process->stop_signal));
      if (stopped_at_[rank] != Clock::time_point{}) {
        text += cat(" ", in_words(Clock::now() - stopped_at_[rank]), " ago");
      }
      return text;
    }
    case 't':
      return "is held by a debugger";
    case 'D':
      return "waits for a device";
    case 'R':
      return "runs";
    default:
      return process->is_gone() ? "is ending" : "sleeps";
  }
}

std::string Stall::describe(Awaited& awaited, const std::string& time) const {
  const uint64_t missing = awaited.missing();
  const bool one = (missing & (missing - 1)) == 0;
  std::string text =
      missing == 0 ? "nothing has moved" : rank_list(missing, called_) + (one ? " has" : " have") + " not arrived";
  text = cat(awaited.describe(), ": ", text, " after ", time);
  for (int rank = 0; rank < kMaxRanks; ++rank) {
    if ((missing >> rank & 1) == 0) continue;
    const std::string state = state_of(rank), last = awaited.describe_peer(rank);
    if (state.empty() && last.empty()) continue;
    text += cat("; rank ", called_.empty() ? rank : called_[rank], state.empty() ? "" : " ", state,
                last.empty()    ? ""
                : state.empty() ? " "
                                : " and ",
                last);
  }
  return text;
}

}  // namespace torchtp::shm
