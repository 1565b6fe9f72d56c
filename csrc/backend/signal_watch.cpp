#include "backend/signal_watch.h"

#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <memory>
#include <utility>

#include "core/error.h"
#include "core/fork_guard.h"
#include "core/format.h"

namespace torchtp::backend {

namespace {

int first_of(uint64_t came) { return 1 + __builtin_ctzll(came); }

}  // namespace

std::atomic<SignalWatch*> SignalWatch::current_{nullptr};

SignalWatch::SignalWatch(const std::vector<int>& signals, std::function<void(int signal)> act)
    : act_(std::move(act)), process_(getpid()) {
  SignalWatch* none = nullptr;
  if (!current_.compare_exchange_strong(none, this)) throw Error("signals are watched already in this process");
  sem_init(&arrived_, 0, 0);
  try {
    thread_ = std::thread([this] { watch(); });
  } catch (...) {  // there is no thread left: another one may be made later
    current_.store(nullptr);
    sem_destroy(&arrived_);
    throw;
  }
  for (const int signal : signals) {
    if (signal <= 0 || signal >= NSIG) continue;
    struct sigaction action{};
    action.sa_handler = &SignalWatch::handle;
    action.sa_flags = SA_RESTART;
    Before& before = before_[signal];
    // False for one that cannot be caught.
    before.is_kept = sigaction(signal, nullptr, &before.action) == 0 && sigaction(signal, &action, nullptr) == 0;
  }
}

SignalWatch::~SignalWatch() {
  const bool is_ours = getpid() == process_;
  ending_.store(true);
  if (is_ours) {  // before signals are given back, which the thread does, too
    sem_post(&arrived_);
    thread_.join();
  } else {
    ForkGuard::leave_as_it_is(std::make_shared<std::thread>(std::move(thread_)));  // it did not come along
  }
  for (int signal = 1; signal < NSIG; ++signal) give_back(signal);
  current_.store(nullptr);
  if (!is_ours) return;
  sem_destroy(&arrived_);
  for (uint64_t came = came_.load(); came != 0; came &= came - 1) kill(process_, first_of(came));
}

// Unless somebody else has taken the signal from us meanwhile.
void SignalWatch::give_back(int signal) {
  struct sigaction now{};
  if (!std::exchange(before_[signal].is_kept, false)) return;
  if (sigaction(signal, nullptr, &now) == 0 && now.sa_handler == &SignalWatch::handle) {
    sigaction(signal, &before_[signal].action, nullptr);
  }
}

// Only what is allowed in a handler.
void SignalWatch::handle(int signal) {
  const int error = errno;
  SignalWatch* const watch = current_.load();
  if (watch != nullptr && getpid() == watch->process_) {
    watch->came_.fetch_or(uint64_t{1} << (signal - 1));
    sem_post(&watch->arrived_);
  } else {
    // A forked child, or the last moment of a watch: as if we were not there.
    if (watch == nullptr) {
      std::signal(signal, SIG_DFL);
    } else {
      sigaction(signal, &watch->before_[signal].action, nullptr);
    }
    kill(getpid(), signal);
  }
  errno = error;
}

void SignalWatch::watch() {
  // The signals are for the program's threads, as they would be without this one.
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
  while (true) {
    if (sem_wait(&arrived_) != 0) continue;
    if (ending_.load()) return;
    for (uint64_t came = came_.exchange(0); came != 0; came &= came - 1) {
      const int signal = first_of(came);
      act_(signal);
      give_back(signal);
      kill(process_, signal);
    }
  }
}

}  // namespace torchtp::backend
