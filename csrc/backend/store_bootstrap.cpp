#include "backend/store_bootstrap.h"

#include <algorithm>
#include <cstdio>
#include <numeric>
#include <optional>
#include <thread>
#include <utility>

#include "backend/signal_handlers.h"
#include "core/deadline.h"
#include "core/format.h"

namespace torchtp::backend {
namespace {

std::vector<int> numbers(int size) {
  std::vector<int> all(size);
  std::iota(all.begin(), all.end(), 0);
  return all;
}

constexpr char kGaveUp[] = "/gave up";
constexpr char kFirst[] = "/first to give up";
constexpr char kHeard[] = "/heard why";

constexpr auto kFirstPause = std::chrono::microseconds(100);
constexpr auto kLastPause = std::chrono::milliseconds(10);
constexpr auto kBetweenLooks = std::chrono::milliseconds(20);
constexpr auto kLongestDying = std::chrono::milliseconds(50);  // from the end of a process's connections to its own
constexpr auto kLongestHearing = std::chrono::milliseconds(30);  // of what each rank looks for every kBetweenLooks

// What is wrong with it is said where all ranks hear it: when the group is made.
std::chrono::milliseconds stall() {
  try {
    return shm::stall_from_environment();
  } catch (const Error&) {
    return shm::kDefaultStall;
  }
}

// Each rank counts its own, by the group's size: a rank has no part in groups that are too small for it.
std::string generation(PatientStore& store, int rank, int size) {
  const std::string of_size = std::to_string(size) + "/";
  return of_size + std::to_string(store.add("torchtp/arrivals/" + of_size + std::to_string(rank), 1));
}

}  // namespace

StoreBootstrap::StoreBootstrap(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                               std::chrono::milliseconds timeout, Acquaintance before)
    : StoreBootstrap(std::make_shared<PatientStore>(std::move(store), timeout), rank, size, timeout) {
  before_ = std::move(before);
}

StoreBootstrap::StoreBootstrap(const std::shared_ptr<PatientStore>& store, int rank, int size,
                               std::chrono::milliseconds timeout)
    : StoreBootstrap(store, rank, size, timeout, "torchtp/" + generation(*store, rank, size), numbers(size)) {}

StoreBootstrap::StoreBootstrap(std::shared_ptr<PatientStore> store, int rank, int size,
                               std::chrono::milliseconds timeout, std::string prefix, std::vector<int> names)
    : store_(std::move(store)),
      rank_(rank),
      size_(size),
      timeout_(timeout),
      stall_(std::min(stall(), timeout / 2)),
      prefix_(std::move(prefix)),
      names_(std::move(names)) {}

StoreBootstrap StoreBootstrap::among(const std::vector<int>& members) const {
  const auto place = std::find(members.begin(), members.end(), rank_) - members.begin();
  StoreBootstrap some(store_, static_cast<int>(place), static_cast<int>(members.size()), timeout_,
                      prefix_ + "/from" + std::to_string(members[0]), members);
  some.interruption_ = interruption_;
  some.end_ = end_;
  if (watched_) some.watch([all = watched_, members](int member) { return all(members[member]); });
  const auto inside = [&members](const auto& all) {
    using Known = std::decay_t<decltype(all)>;
    return all ? Known([all, members](int member) { return all(members[member]); }) : Known();
  };
  some.before_ = {inside(before_.presence), inside(before_.wait_for)};
  return some;
}

std::vector<std::string> StoreBootstrap::all_gather(const std::string& mine) {
  ++round_;
  std::vector<std::string> all(size_);
  try {
    store_->set(key(rank_), mine);
    for (int rank = 0; rank < size_; ++rank) {
      if (rank != rank_) wait_for(rank);
      all[rank] = rank == rank_ ? mine : store_->get(key(rank));
    }
  } catch (const StoreError& error) {
    give_up(cat(error.what(), ended()));  // the ranks that have ended may have served it
  }
  if (!end_) end_ = Deadline(timeout_);
  return all;
}

std::chrono::milliseconds StoreBootstrap::left() const {
  return std::chrono::duration_cast<std::chrono::milliseconds>(end_.value_or(Deadline(timeout_)).left());
}

void StoreBootstrap::wait_for(int rank) {
  const Deadline deadline(left());
  std::optional<Deadline> stall(stall_);
  Deadline next_look(kBetweenLooks);
  std::chrono::microseconds pause = kFirstPause;
  std::unique_ptr<shm::OutsideWait> wait;
  while (!store_->has(key(rank))) {
    look_at(rank, rank);
    if (next_look.passed()) {
      look_around(rank);
      handle_signals();
      next_look = Deadline(kBetweenLooks);
      if (!wait && before_.wait_for) wait = before_.wait_for(rank);
      if (const std::string deadlock = wait ? wait->look() : ""; !deadlock.empty()) give_up(deadlock);
      if (stall && stall->passed()) {
        stall.reset();
        report_missing(rank, wait.get());
      }
    }
    if (deadline.passed()) {
      give_up(cat("rank ", names_[rank], " did not come to the creation of the process group within ",
                  in_words(timeout_), "; rank ", names_[rank_], " waited for it"));
    }
    std::this_thread::sleep_for(pause);
    pause = std::min<std::chrono::microseconds>(2 * pause, kLastPause);
  }
  if (wait) wait->end();
}

void StoreBootstrap::report_missing(int rank, const shm::OutsideWait* wait) const {
  const std::string line =
      cat("[torchtp] a process group of ", size_, " ranks is being made: rank ", names_[rank], " has not come after ",
          in_words(stall_), "; rank ", names_[rank_], " waits for it, for ", in_words(timeout_), " at most",
          wait == nullptr ? "" : "; " + wait->describe(), "\n");
  std::fputs(line.c_str(), stderr);
}

// While the awaited rank has not come, nobody can be through with the creation: who has ended has given up or died in
// it, whatever it said before.
void StoreBootstrap::look_around(int awaited) {
  for (int rank = 0; rank < size_; ++rank) look_at(rank, awaited);
  if (!store_->has(key(awaited))) read_why_others_gave_up();
}

void StoreBootstrap::look_at(int rank, int awaited) {
  if (presence(rank) == shm::Presence::kThere || store_->has(key(awaited))) return;
  give_up_for(rank);
}

shm::Presence StoreBootstrap::presence(int rank) const {
  if (watched_ && watched_(rank)) return shm::Presence::kDied;
  return before_.presence ? before_.presence(rank) : shm::Presence::kThere;
}

void StoreBootstrap::give_up_for(int rank) {
  read_why_others_gave_up();
  if (presence(rank) == shm::Presence::kLeft) {
    give_up(cat("rank ", names_[rank], " left the default group while another one was being made with it"));
  }
  give_up(cat("rank ", names_[rank], " died (its process is gone) while the group was being made"));
}

void StoreBootstrap::look() {
  for (int rank = 0; rank < size_; ++rank) {
    if (presence(rank) != shm::Presence::kThere) give_up_for(rank);
  }
  read_why_others_gave_up();
  handle_signals();
}

void StoreBootstrap::handle_signals() {
  try {
    run_signal_handlers();
  } catch (const std::exception& error) {
    tell(cat("rank ", names_[rank_], " was interrupted by a signal (", error.what(),
             ") while the group was being made"));
    *interruption_ = std::current_exception();
    over_ = true;
    throw;
  }
}

// For those who cannot see the reason themselves.
void StoreBootstrap::read_why_others_gave_up() {
  if (!store_->has(prefix_ + kGaveUp)) return;
  const std::string why = store_->get(prefix_ + kGaveUp);
  over_ = true;
  let_others_hear();
  throw Error(why);
}

// Rank 0 mostly serves the store, which ends with it.
void StoreBootstrap::let_others_hear() {
  try {
    int64_t heard = store_->add(prefix_ + kHeard, 1);
    const Deadline deadline(kLongestHearing);
    while (rank_ == 0 && heard < num_present() && !deadline.passed()) {
      std::this_thread::sleep_for(kFirstPause);
      heard = store_->add(prefix_ + kHeard, 0);
    }
  } catch (const StoreError&) {
    // It has ended before.
  }
}

int64_t StoreBootstrap::num_present() const {
  int64_t count = 0;
  for (int rank = 0; rank < size_; ++rank) count += presence(rank) == shm::Presence::kThere;
  return count;
}

std::string StoreBootstrap::ended() const {
  std::string text;
  const Deadline end_of_looking(kLongestDying);
  while ((watched_ || before_.presence) && text.empty() && !end_of_looking.passed()) {
    for (int rank = 0; rank < size_; ++rank) {
      if (presence(rank) != shm::Presence::kThere) text += cat("; rank ", names_[rank], " has ended");
    }
    std::this_thread::sleep_for(kFirstPause);
  }
  return text;
}

void StoreBootstrap::give_up(const std::string& why) {
  over_ = true;
  tell(why);
  try {
    read_why_others_gave_up();
  } catch (const StoreError&) {
    // Then nobody hears of the others.
  }
  throw Error(why);
}

// But where a death may be the cause: that is found when the dead one is waited for.
void StoreBootstrap::tell_of_failure(const std::string& why) {
  if (ended().empty()) tell(why);
}

void StoreBootstrap::tell(const std::string& why) {
  try {
    if (store_->add(prefix_ + kFirst, 1) > 1) return;
    store_->set(prefix_ + kGaveUp, why);
    store_->has(prefix_ + kGaveUp);  // TCPStore sends what is set without an answer: who ends now might take it along
  } catch (const StoreError&) {
    // What has failed first matters more.
  }
}

std::string StoreBootstrap::key(int rank) const {
  return prefix_ + "/" + std::to_string(round_) + "/" + std::to_string(rank);
}

}  // namespace torchtp::backend
