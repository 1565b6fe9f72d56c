#include "backend/store_bootstrap.h"

#include <algorithm>
#include <cstdio>
#include <numeric>
#include <optional>
#include <sstream>
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
constexpr char kHeard[] = "/heard why/";

constexpr auto kFirstPause = std::chrono::microseconds(100);
constexpr auto kLastPause = std::chrono::milliseconds(10);
constexpr auto kBetweenLooks = std::chrono::milliseconds(20);
constexpr auto kLongestDying = std::chrono::milliseconds(50);  // from the end of a process's connections to its own
// Of what each rank looks for every kBetweenLooks. As long only where one that has come has died and nobody saw it.
constexpr auto kLongestHearing = std::chrono::seconds(5);

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
  std::vector<std::string> all;
  try {
    store_->set(key(rank_), mine);
    std::vector<std::string> keys;
    for (int rank = 0; rank < size_; ++rank) keys.push_back(key(rank));
    wait_for(keys);
    all = store_->get_all(keys);
  } catch (const StoreError& error) {
    const std::string why = cat(error.what(), ended());  // the ranks that have ended may have served it
    end_for_all(why, kNobody);
    throw shm::MeetingLost(why);
  }
  if (!end_) end_ = Deadline(timeout_);
  return all;
}

std::chrono::milliseconds StoreBootstrap::left() const {
  return std::chrono::duration_cast<std::chrono::milliseconds>(end_.value_or(Deadline(timeout_)).left());
}

// Many ranks are far from the store, so all are asked for at once; who is missing is found out where that matters.
void StoreBootstrap::wait_for(const std::vector<std::string>& keys) {
  const auto is_gone = [this](int rank) { return presence(rank) != shm::Presence::kThere; };
  const std::vector<int> all = numbers(size_);
  Deadline next_look(kBetweenLooks);
  std::chrono::microseconds pause = kFirstPause;
  std::optional<Awaited> awaited;
  while (!store_->has_all(keys)) {
    const bool looks = next_look.passed();
    if (looks || std::any_of(all.begin(), all.end(), is_gone)) {
      int rank = awaited ? awaited->rank : 0;
      while (rank < size_ && store_->has(keys[rank])) ++rank;
      if (rank == size_) break;
      look_around(rank);
      if (!awaited || awaited->rank != rank) {
        if (awaited) awaited->end();
        awaited = Awaited{rank, Deadline(left()), Deadline(stall_), nullptr};
      }
      handle_signals();
      if (looks) look_for(*awaited);
      next_look = Deadline(kBetweenLooks);
    }
    std::this_thread::sleep_for(pause);
    pause = std::min<std::chrono::microseconds>(2 * pause, kLastPause);
  }
  if (awaited) awaited->end();
}

// Throws when it has been waited for long enough, or would be for ever.
void StoreBootstrap::look_for(Awaited& awaited) {
  const int rank = awaited.rank;
  if (!awaited.wait && before_.wait_for) awaited.wait = before_.wait_for(rank);
  const std::string deadlock = awaited.wait ? awaited.wait->look() : "";
  if (!deadlock.empty()) give_up(deadlock, kNobody);
  if (awaited.stall && awaited.stall->passed()) {
    awaited.stall.reset();
    report_missing(rank, awaited.wait.get());
  }
  if (!awaited.deadline.passed()) return;
  give_up(
      cat("rank ", names_[rank], all_have_come() ? " did not go on with" : " did not come to",
          " the creation of the process group within ", in_words(timeout_), "; rank ", names_[rank_], " waited for it"),
      rank);
}

void StoreBootstrap::report_missing(int rank, const shm::OutsideWait* wait) const {
  const std::string line = cat("[torchtp] a process group of ", size_, " ranks is being made: rank ", names_[rank],
                               all_have_come() ? " has not gone on after " : " has not come after ", in_words(stall_),
                               "; rank ", names_[rank_], " waits for it, for ", in_words(timeout_), " at most",
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
    give_up(cat("rank ", names_[rank], " left the default group while another one was being made with it"), rank);
  }
  give_up(cat("rank ", names_[rank], " died (its process is gone) while the group was being made"), rank);
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
    tell(
        cat("rank ", names_[rank_], " was interrupted by a signal (", error.what(), ") while the group was being made"),
        rank_);  // who does not wait for others to hear of it
    *interruption_ = std::current_exception();
    over_ = true;
    throw;
  }
}

// For those who cannot see the reason themselves.
void StoreBootstrap::read_why_others_gave_up() {
  if (!store_->has(prefix_ + kGaveUp)) return;
  std::istringstream told(store_->get(prefix_ + kGaveUp));
  std::string why;
  std::getline(told >> suspect_ >> std::ws, why, '\0');
  over_ = true;
  let_others_hear();
  throw Error(why);
}

// Rank 0 mostly serves the store, which ends with it.
void StoreBootstrap::let_others_hear() {
  try {
    const auto heard = [this](int rank) { return prefix_ + kHeard + std::to_string(rank); };
    store_->add(heard(rank_), 1);
    if (rank_ != 0) return;
    std::vector<int> others = numbers(size_);
    const auto drop_if = [&others](const auto& is_done) {
      others.erase(std::remove_if(others.begin(), others.end(), is_done), others.end());
    };
    // Who has not come yet looks first whether it is over.
    drop_if([this](int rank) { return rank == suspect_ || !store_->has(key(rank, 1)); });
    const Deadline deadline(kLongestHearing);
    std::chrono::microseconds pause = kFirstPause;
    for (;;) {
      drop_if([&](int rank) { return presence(rank) != shm::Presence::kThere || store_->has(heard(rank)); });
      if (others.empty() || deadline.passed()) return;
      std::this_thread::sleep_for(pause);
      pause = std::min<std::chrono::microseconds>(2 * pause, kLastPause);
    }
  } catch (const StoreError&) {
    // It has ended before.
  }
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

void StoreBootstrap::give_up(const std::string& why, int suspect) {
  end_for_all(why, suspect);
  throw Error(why);
}

// Throws what another rank has said before, if one has.
void StoreBootstrap::end_for_all(const std::string& why, int suspect) {
  over_ = true;
  tell(why, suspect);
  try {
    read_why_others_gave_up();
  } catch (const StoreError&) {
    // Then nobody hears of the others.
  }
}

// But where a death may be the cause: that is found when the dead one is waited for.
void StoreBootstrap::tell_of_failure(const std::string& why, int suspect) {
  if (ended().empty()) tell(why, suspect);
}

void StoreBootstrap::tell(const std::string& why, int suspect) {
  try {
    if (store_->add(prefix_ + kFirst, 1) > 1) return;
    store_->set(prefix_ + kGaveUp, cat(suspect, " ", why));
    store_->has(prefix_ + kGaveUp);  // TCPStore sends what is set without an answer: who ends now might take it along
  } catch (const StoreError&) {
    // What has failed first matters more.
  }
}

std::string StoreBootstrap::key(int rank, int64_t round) const {
  return prefix_ + "/" + std::to_string(round) + "/" + std::to_string(rank);
}

}  // namespace torchtp::backend
