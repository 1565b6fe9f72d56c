#pragma once

#include <chrono>

#include "shm/layout.h"

namespace torchtp::shm {

// Wakes whoever sleeps on the bell. What they wait for was stored before, sequentially consistent: either the sleeper
// sees that store after it has said that it sleeps, or we see here that it does. No system call when nobody sleeps.
void ring(Bell& bell) noexcept;

// One nap: says that it sleeps, then may be asked to sleep; destruction takes the word back.
class Nap {
 public:
  explicit Nap(Bell& bell);
  ~Nap();
  Nap(const Nap&) = delete;
  Nap& operator=(const Nap&) = delete;
  // Until the bell is rung (also if it was since construction) or the time is over.
  void sleep(std::chrono::nanoseconds at_most);

 private:
  Bell& bell_;
  uint32_t rung_;
};

// Tells the processor that this is a spinning loop.
inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace torchtp::shm
