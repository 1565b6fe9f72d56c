#pragma once

// What tests of ranks that wait in several groups share.

#include <atomic>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>

#include "check.h"
#include "processes.h"
#include "shm/group.h"
#include "shm/whereabouts.h"

namespace torchtp::test {
// Memory that the ranks of a test map beside their groups: who has reported, and a bootstrap for some of them.
class Beside {
 public:
  explicit Beside(int most_ranks)
      : file_(sized(Fd::memory("beside"), kFlags + most_ranks * sizeof(ProcessBootstrap::Page))),
        mapping_(file_, kFlags + most_ranks * sizeof(ProcessBootstrap::Page)) {}

  void say(int what) { flag(what) = 1; }
  void await(int what) {
    while (flag(what) == 0) usleep(1000);
  }
  // Of the ranks whose pages begin with the one given.
  ProcessBootstrap bootstrap(int rank, int size, int first_page = 0) {
    return {mapping_.data() + kFlags + first_page * sizeof(ProcessBootstrap::Page), rank, size};
  }

 private:
  static constexpr size_t kFlags = 4096;
  static Fd sized(Fd file, size_t num_bytes) {
    CHECK(ftruncate(file.get(), static_cast<off_t>(num_bytes)) == 0);
    return file;
  }
  std::atomic<int>& flag(int what) { return reinterpret_cast<std::atomic<int>*>(mapping_.data())[what]; }

  const Fd file_;
  const Mapping mapping_;
};

inline shm::GroupOptions options(const std::string& name, const std::shared_ptr<shm::Whereabouts>& whereabouts,
                                 const std::function<void(const std::string&)>& warn) {
  shm::GroupOptions options;
  options.slot_bytes = options.ring_bytes = options.mailbox_bytes = 4096;
  options.heap_bytes = size_t{1} << 20;
  options.timeout = std::chrono::seconds(40);
  options.stall_after = std::chrono::milliseconds(120);
  options.name = name;
  options.describe = [](const shm::Fingerprint& f, const std::string&) {
    return "call #" + std::to_string(f.sequence);
  };
  options.warn = warn;
  options.whereabouts = whereabouts;
  return options;
}

inline shm::Fingerprint step(uint64_t sequence) {
  shm::Fingerprint fingerprint;
  fingerprint.sequence = sequence;
  return fingerprint;
}

inline void check_lacks(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) throw std::runtime_error("'" + part + "' is in: " + text);
}

}  // namespace torchtp::test
