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

// Those of the ranks that are in the other group, as it numbers them.
uint64_t renumbered(uint64_t ranks, const std::vector<std::string>& processes, const std::vector<std::string>& there) {
  uint64_t out = 0;
  for (size_t rank = 0; rank < processes.size(); ++rank) {
    if ((ranks >> rank & 1) == 0 || only_rank_of(processes, processes[rank]) < 0) continue;
    const int other = only_rank_of(there, processes[rank]);
    if (other >= 0) out |= uint64_t{1} << other;
  }
  return out;
}

}  // namespace

void Whereabouts::add(const Group& group, std::string name, std::vector<std::string> processes, Board& mine) {
  std::lock_guard<std::mutex> lock(mutex_);
  // Groups of an earlier life, whose objects may live on in a mesh, have ended for all that come after them.
  const auto has_ended = [](const Entry& each) {
    return each.failed_ns != 0 && each.group->presence(each.group->rank()) == Presence::kLeft;
  };
  waits_.erase(std::remove_if(waits_.begin(), waits_.end(), has_ended), waits_.end());
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

const Whereabouts::Member* Whereabouts::find(const Group& group) const {
  const auto found =
      std::find_if(members_.begin(), members_.end(), [&](const Member& each) { return each.group == &group; });
  return found == members_.end() ? nullptr : &*found;
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
  const Member* const from = find(*entry.group);
  const bool elsewhere = from != nullptr && from->group != to.group;
  write_text(out.call, entry.wait.call, elsewhere ? cat(" of group '", from->name, "'") : "");
  if (from == nullptr) return out;
  out.for_ranks = renumbered(entry.wait.for_ranks, from->processes, to.processes);
  return out;
}

bool Whereabouts::follow(const Group& group, uint64_t missing, Circle& circle) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const Member* const here = find(group);
  const auto missed_in = [&](const Member& there) { return renumbered(missing, here->processes, there.processes); };
  const auto told_in = [](const Member& there) {
    return [&group = *there.group](int rank) {
      std::vector<ToldWait> waits = group.waits_of(rank);
      if (!waits.empty() && !group.runs(rank)) waits.clear();  // asked last: it takes calls of the system
      return waits;
    };
  };
  const Member* const before = circle.links.empty() ? nullptr : find(*circle.group);
  if (before && goes_on(circle, before->group->rank(), missed_in(*before), told_in(*before))) return true;
  // First this group: its numbers are those of the rest of a message.
  std::vector<const Member*> members{here};
  for (const Member& each : members_) {
    if (&each != here) members.push_back(&each);
  }
  circle = {};
  for (const Member* const each : members) {
    const Group& there = *each->group;
    circle.links = find_circle(there.rank(), missed_in(*each), told_in(*each));
    if (circle.links.empty()) continue;
    for (Circle::Link& link : circle.links) link.called = there.called(link.rank);
    circle.group = &there;
    circle.name = each->name;
    circle.asking = there.called(there.rank());
    break;
  }
  return false;
}

LongWait::LongWait(std::shared_ptr<Whereabouts> whereabouts, const Group& group)
    : whereabouts_(std::move(whereabouts)), group_(group), since_ns_(now_ns()) {}

LongWait::~LongWait() {
  if (id_ != 0) whereabouts_->fail(id_);
}

void LongWait::tell(Whereabouts::Wait wait) {
  if (!whereabouts_ || tells(wait.for_ranks, wait.is_blocked)) return;
  wait.since_ns = since_ns_;
  for_ranks_ = wait.for_ranks;
  is_blocked_ = wait.is_blocked;
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
