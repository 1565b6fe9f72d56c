#include "core/fork_guard.h"

#include <fcntl.h>
#include <unistd.h>

#include <utility>

#include "core/fd.h"

namespace torchtp {

void ForkGuard::add(const std::vector<int>& sockets) {
  const std::lock_guard<std::mutex> lock(mutex_);
  sockets_.insert(sockets.begin(), sockets.end());
}

void ForkGuard::remove(const std::vector<int>& sockets) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const int socket : sockets) sockets_.erase(socket);
}

void ForkGuard::leave_as_it_is(std::shared_ptr<void> owned) { new std::shared_ptr<void>(std::move(owned)); }

void ForkGuard::after_fork_in_child() {
  if (!sockets_.empty()) {
    const Fd nowhere(open("/dev/null", O_RDWR | O_CLOEXEC));
    for (const int socket : sockets_) {
      if (nowhere) {
        dup3(nowhere.get(), socket, O_CLOEXEC);
      } else {
        close(socket);
      }
    }
    sockets_.clear();
  }
  mutex_.unlock();
}

}  // namespace torchtp
