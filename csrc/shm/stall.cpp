#include "shm/stall.h"

#include <algorithm>
#include <csignal>

#include "core/clock.h"
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

std::string describe(const ToldWait& wait) {
  const int64_t until = wait.failed_ns != 0 ? wait.failed_ns : now_ns();
  const std::string time = in_words(std::chrono::nanoseconds(std::max<int64_t>(until - wait.since_ns, 0)));
  std::string text = cat(wait.failed_ns != 0 ? "was in " : "has been in ", wait.call, " for ", time);
  if (wait.failed_ns != 0) text += ", until that failed";
  const std::string missing = wait.missing;
  const bool many = missing.rfind("ranks", 0) == 0;
  return missing.empty() ? text : cat(text, " (", missing, many ? " have" : " has", " not arrived there)");
}

// "a", "a and b", "a, b and c".
std::string sentence(const std::vector<std::string>& parts) {
  std::string text;
  for (size_t i = 0; i < parts.size(); ++i) {
    text += (i == 0 ? "" : i + 1 == parts.size() ? " and " : ", ") + parts[i];
  }
  return text;
}

}  // namespace

void Stall::look(Awaited& awaited, bool is_blocked) {
  is_blocked_ = is_blocked;
  if (!is_blocked_) circle_ = {};
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
  // The first to fail in a circle shall not leave the others to their timeouts.
  circle_.is_settled = circle_age() >= deadlock_after_ / 2;
  if (is_blocked_ && !follow_(missing, circle_)) circle_seen_at_ = now;
}

std::chrono::nanoseconds Stall::circle_age() const {
  return circle_.links.empty() ? std::chrono::nanoseconds{0} : looked_at_ - circle_seen_at_;
}

bool Stall::waits_for_us(const std::vector<ToldWait>& waits) const {
  return is_blocked_ &&
         std::any_of(waits.begin(), waits.end(), [&](const ToldWait& wait) { return wait.blocks_for(rank_); });
}

std::string Stall::state_of(int rank, const std::vector<ToldWait>& waits) const {
  const auto process = liveness_.process(rank);
  if (!process) return "";
  const bool waits_in_a_call =
      std::any_of(waits.begin(), waits.end(), [](const ToldWait& wait) { return wait.is_blocking(); });
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
      return waits_in_a_call ? "" : "runs";
    default:
      if (process->is_gone()) return "is ending";
      return waits_in_a_call ? "" : "sleeps";
  }
}

std::string Stall::describe(Awaited& awaited, const std::string& time) const {
  const uint64_t missing = awaited.missing();
  const bool one = (missing & (missing - 1)) == 0;
  std::string text =
      missing == 0 ? "nothing has moved" : rank_list(missing, called_) + (one ? " has" : " have") + " not arrived";
  text = cat(awaited.describe(), ": ", text, " after ", time);
  uint64_t waiting_for_us = 0;
  for (int rank = 0; rank < kMaxRanks; ++rank) {
    if ((missing >> rank & 1) == 0) continue;
    const std::vector<ToldWait> waits = waits_of_(rank);
    std::vector<std::string> known{state_of(rank, waits)};
    for (const ToldWait& wait : waits) known.push_back(torchtp::shm::describe(wait));
    if (waits_for_us(waits)) waiting_for_us |= uint64_t{1} << rank;
    known.push_back(awaited.describe_peer(rank));
    known.erase(std::remove(known.begin(), known.end(), ""), known.end());
    if (!known.empty()) text += cat("; rank ", called_.empty() ? rank : called_[rank], " ", sentence(known));
  }
  std::string circle;
  if (waiting_for_us != 0) {
    const bool many = (waiting_for_us & (waiting_for_us - 1)) != 0;
    circle = cat(rank_list(waiting_for_us, called_), many ? " wait" : " waits", " there for rank ",
                 called_.empty() ? rank_ : called_[rank_], ", which waits here");
  } else if (!circle_.links.empty()) {
    circle = circle_.describe();
  }
  if (circle.empty()) return text;
  return cat(
      text, "; ", circle,
      ": unless another thread of theirs comes to one of these calls, that is a deadlock (all ranks must make the "
      "same calls in the same order)");
}

}  // namespace torchtp::shm
