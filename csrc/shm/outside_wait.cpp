#include "shm/outside_wait.h"

#include <utility>

#include "core/format.h"
#include "core/process.h"
#include "shm/liveness.h"
#include "shm/stall.h"
#include "shm/whereabouts.h"

namespace torchtp::shm {

struct OutsideWait::State : Awaited {
  State(std::shared_ptr<Group> in, int rank, std::string what)
      : group(std::move(in)),
        mask(uint64_t{1} << rank),
        what(std::move(what)),
        stall(
            *group->liveness_, group->options_.called, group->rank(),
            [this](int peer) { return group->waits_of(peer); },
            [this](uint64_t missing, Circle& circle) { return group->whereabouts()->follow(*group, missing, circle); },
            group->options_.deadlock_after),
        long_wait(group->whereabouts(), *group) {
    long_wait.tell({this->what, "", mask, is_blocked()});
  }

  bool is_blocked() const { return on_main_thread() && !group->may_come_by_thread(mask); }

  bool ready() override { return false; }
  uint64_t missing() override { return mask; }
  std::string describe() override { return what; }

  const std::shared_ptr<Group> group;
  const uint64_t mask;
  const std::string what;
  Stall stall;
  LongWait long_wait;
};

OutsideWait::OutsideWait(std::shared_ptr<Group> group, int rank, std::string what)
    : state_(group->whereabouts() ? std::make_unique<State>(std::move(group), rank, std::move(what)) : nullptr) {}

OutsideWait::~OutsideWait() = default;

std::string OutsideWait::look() {
  if (!state_) return "";
  state_->stall.look(*state_, state_->is_blocked());
  return state_->stall.is_deadlock() ? describe() : "";
}

std::string OutsideWait::describe() const {
  return state_ ? state_->stall.describe(*state_, in_words(state_->stall.age())) : "";
}

void OutsideWait::end() noexcept {
  if (state_) state_->long_wait.end();
}

}  // namespace torchtp::shm
