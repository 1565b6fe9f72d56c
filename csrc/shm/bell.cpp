#include "shm/bell.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace torchtp::shm {

namespace {

// Not FUTEX_PRIVATE: the sleepers are other processes.
void futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* at_most) noexcept {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, at_most, nullptr, 0);
}

}  // namespace

void ring(Bell& bell) noexcept {
  if (bell.sleepers.load() == 0) return;
  bell.rung.fetch_add(1);
  futex(bell.rung, FUTEX_WAKE, INT_MAX, nullptr);
}

Nap::Nap(Bell& bell) : bell_(bell) {
  bell_.sleepers.fetch_add(1);
  rung_ = bell_.rung.load();
}

Nap::~Nap() { bell_.sleepers.fetch_sub(1); }

void Nap::sleep(std::chrono::nanoseconds at_most) {
  const timespec time{static_cast<time_t>(at_most.count() / 1'000'000'000), at_most.count() % 1'000'000'000};
  futex(bell_.rung, FUTEX_WAIT, rung_, &time);
}

}  // namespace torchtp::shm
