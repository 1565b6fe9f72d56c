#pragma once

#include <semaphore.h>
#include <sys/types.h>

#include <array>
#include <atomic>
#include <csignal>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace torchtp::backend {

// Calls `act` on a thread of its own when one of the signals arrives, then lets happen what would have happened without
// us: the handler that was there before, or the signal's default. At most one in a process. A forked child is not
// watched.
class SignalWatch {
 public:
  SignalWatch(const std::vector<int>& signals, std::function<void(int signal)> act);
  ~SignalWatch();
  SignalWatch(const SignalWatch&) = delete;
  SignalWatch& operator=(const SignalWatch&) = delete;

 private:
  static void handle(int signal);
  void watch();
  void give_back(int signal);

  static std::atomic<SignalWatch*> current_;

  const std::function<void(int)> act_;
  const pid_t process_;
  struct Before {
    bool is_kept = false;
    struct sigaction action{};
  };
  std::array<Before, NSIG> before_;  // by signal; a plain array, for handlers read it
  sem_t arrived_;
  std::atomic<uint64_t> came_{0};  // bit n: signal n + 1, not acted on yet; several may come at once
  std::atomic<bool> ending_{false};
  std::thread thread_;
};

}  // namespace torchtp::backend
