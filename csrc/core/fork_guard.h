#pragma once

#include <memory>
#include <mutex>
#include <set>
#include <vector>

namespace torchtp {

// Sockets that a forked child must not keep: the other side would take the rank for alive as long as the child lives,
// and what the child shuts down ends for its parent, too. Thread-safe.
class ForkGuard {
 public:
  void add(const std::vector<int>& sockets);
  void remove(const std::vector<int>& sockets);  // before they are closed

  // In a forked child, instead of ending what has threads: they are not there, and what they held stays held.
  static void leave_as_it_is(std::shared_ptr<void> owned);

  // Around a fork, on the thread that forks.
  void before_fork() { mutex_.lock(); }
  void after_fork_in_parent() { mutex_.unlock(); }
  void after_fork_in_child();  // its descriptors stay open, and lead nowhere

 private:
  std::mutex mutex_;
  std::set<int> sockets_;
};

}  // namespace torchtp
