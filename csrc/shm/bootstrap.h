#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace torchtp::shm {

// How ranks of one host swap small blobs before they share memory: the backend implements it over a c10d store (with a
// generation prefix), tests over threads.
class Bootstrap {
 public:
  virtual ~Bootstrap() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // Element r of the result is what rank r passed in. Collective; throws when a rank does not come.
  virtual std::vector<std::string> all_gather(const std::string& mine) = 0;
  // From now on all_gather asks every few milliseconds whether the rank it waits for has died. Who has may have said
  // its part before.
  virtual void watch(std::function<bool(int rank)> has_died) { (void)has_died; }
  // Ranks that are threads of one process return what rank 0 passed in, so that all of them use one mapping (and the
  // thread sanitizer sees their races). Ranks that are processes return nullptr: they get the memory over a socket.
  virtual std::shared_ptr<void> share(std::shared_ptr<void> mine) {
    (void)mine;
    return nullptr;
  }
};

}  // namespace torchtp::shm
