#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

#include "shm/layout.h"

namespace torchtp::shm {

namespace {

// Not FUTEX_PRIVATE: the sleepers are other processes.
void futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* at_most) noexcept {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, at_most, nullptr, 0);
}

}  // namespace

void Processes::wake(std::atomic<uint32_t>& word) noexcept { futex(word, FUTEX_WAKE, INT_MAX, nullptr); }

void Processes::sleep(std::atomic<uint32_t>& word, uint32_t value, std::chrono::nanoseconds at_most) noexcept {
  const timespec time{static_cast<time_t>(at_most.count() / 1'000'000'000), at_most.count() % 1'000'000'000};
  futex(word, FUTEX_WAIT, value, &time);
}

}  // namespace torchtp::shm
