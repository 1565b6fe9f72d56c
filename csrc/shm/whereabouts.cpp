#include "shm/whereabouts.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/clock.h"
#include "core/format.h"
#include "shm/protocol.h"

namespace torchtp::shm {

namespace {

std::string shortened(const std::string& text, size_t most) {
  return text.size() <= most ? text : text.substr(0, most - 3) + "...";
}

template <size_t kBytes>
void write_text(char (&to)[kBytes], const std::string& text, const std::string& suffix = "") {
  const std::string end = shortened(suffix, kBytes / 3);
  const std::string all = shortened(text, kBytes - 1 - end.size()) + end;
  to[all.copy(to, kBytes - 1)] = 0;
}

// -1 unless exactly one rank is that process: ranks that are threads cannot be told apart.
int only_rank_of(const std::vector<std::string>& processes, const std::string& process) {
  const auto found = std::find(processes.begin(), processes.end(), process);
  if (found == processes.end() || std::find(found + 1, processes.end(), process) != processes.end()) return -1;
  return static_cast<int>(found - processes.begin());
}

}  // namespace

void Whereabouts::add(const Group& group, std::string name, std::vector<std::string> processes, Board& mine) {
  std::lock_guard<std::mutex> lock(mutex_);
  members_.push_back({&group, std::move(name), std::move(processes), &mine});
  if (!waits_.empty()) tell_all();
}

void Whereabouts::remove(const Group& group) {
  std::lock_guard<std::mutex> lock(mutex_);
  members_.erase(
      std::remove_if(members_.begin(), members_.end(), [&](const Member& each) { return each.group == &group; }),
      members_.end());
  const auto gone =
      std::remove_if(waits_.begin(), waits_.end(), [&](const Entry& each) { return each.group == &group; });
  if (gone == waits_.end()) return;
  waits_.erase(gone, waits_.end());
  tell_all();
}

uint64_t Whereabouts::begin(const Group& group, Wait wait) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto failed = std::find_if(waits_.begin(), waits_.end(), [](const Entry& each) { return each.failed_ns != 0; });
  waits_.insert(failed, {++last_id_, &group, std::move(wait), 0});
  tell_all();
  return last_id_;
}

void Whereabouts::change(uint64_t id, Wait wait) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (Entry* const entry = find(id)) entry->wait = std::move(wait);
  tell_all();
}

void Whereabouts::end(uint64_t id) {
  std::lock_guard<std::mutex> lock(mutex_);
  waits_.erase(std::remove_if(waits_.begin(), waits_.end(), [&](const Entry& each) { return each.id == id; }),
               waits_.end());
  tell_all();
}

void Whereabouts::fail(uint64_t id) {
  std::lock_guard<std::mutex> lock(mutex_);
  Entry* const entry = find(id);
  if (entry == nullptr) return;
  entry->failed_ns = now_ns();
  std::stable_partition(waits_.begin(), waits_.end(), [](const Entry& each) { return each.failed_ns == 0; });
  tell_all();
}

Whereabouts::Entry* Whereabouts::find(uint64_t id) {
  const auto found = std::find_if(waits_.begin(), waits_.end(), [&](const Entry& each) { return each.id == id; });
  return found == waits_.end() ? nullptr : &*found;
}

void Whereabouts::tell_all() const {
  for (const Member& to : members_) {
    ToldWaits all;
    for (size_t i = 0; i < std::min(waits_.size(), all.size()); ++i) all[i] = told(waits_[i], to);
    uint64_t words[kToldWords];
    std::memcpy(words, all.data(), sizeof(words));
    write_board(*to.mine, words);
  }
}

ToldWait Whereabouts::told(const Entry& entry, const Member& to) const {
  ToldWait out;
  out.since_ns = entry.wait.since_ns;
  out.failed_ns = entry.failed_ns;
  out.is_blocked = entry.wait.is_blocked ? 1 : 0;
  write_text(out.missing, entry.wait.missing);
  const auto from =
      std::find_if(members_.begin(), members_.end(), [&](const Member& each) { return each.group == entry.group; });
  const bool elsewhere = from != members_.end() && from->group != to.group;
  write_text(out.call, entry.wait.call, elsewhere ? cat(" of group '", from->name, "'") : "");
  if (from == members_.end()) return out;
  for (size_t rank = 0; rank < from->processes.size(); ++rank) {
    if ((entry.wait.for_ranks >> rank & 1) == 0) continue;
    if (only_rank_of(from->processes, from->processes[rank]) < 0) continue;
    const int there = only_rank_of(to.processes, from->processes[rank]);
    if (there >= 0) out.for_ranks |= uint64_t{1} << there;
  }
  return out;
}

LongWait::LongWait(std::shared_ptr<Whereabouts> whereabouts, const Group& group)
    : whereabouts_(std::move(whereabouts)), group_(group), since_ns_(now_ns()) {}

LongWait::~LongWait() {
  if (id_ != 0) whereabouts_->fail(id_);
}

void LongWait::tell(Whereabouts::Wait wait) {
  if (!whereabouts_ || tells(wait.for_ranks)) return;
  wait.since_ns = since_ns_;
  for_ranks_ = wait.for_ranks;
  if (id_ == 0) {
    id_ = whereabouts_->begin(group_, std::move(wait));
  } else {
    whereabouts_->change(id_, std::move(wait));
  }
}

void LongWait::end() noexcept {
  if (id_ != 0) whereabouts_->end(std::exchange(id_, 0));
}

}  // namespace torchtp::shm
