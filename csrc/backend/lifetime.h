#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <system_error>

#include "backend/device_group.h"
#include "backend/engine.h"
#include "backend/runner.h"
#include "shm/outside_wait.h"

namespace torchtp::backend {

// What the calls of one process group run on, and how that ends: with the group, or before it with the program.
// Thread-safe.
class Lifetime {
 public:
  Lifetime(std::shared_ptr<Engine> engine, std::shared_ptr<DeviceGroup> device);
  ~Lifetime();
  Lifetime(const Lifetime&) = delete;
  Lifetime& operator=(const Lifetime&) = delete;

  void check() const;  // DistBackendError once it is over

  // What the group knows, as long as it is not over.
  shm::Presence presence(int rank) const { return over_ ? shm::Presence::kThere : engine_->presence(rank); }
  // Begins to wait for a rank of this host with something that is no call of the group; nothing for other ranks.
  std::unique_ptr<shm::OutsideWait> wait_outside(int rank, const std::string& what) const;

  // See Runner. `sequence` is the call's; a wait for those before it answers signals, which may end the group.
  void submit(std::function<void()> task);
  void run(uint64_t sequence, const std::function<void()>& task);
  Runner::Places places() const { return runner_.places(); }

  // Ends the group, of which this rank can't carry out what all have called, and throws the cause.
  [[noreturn]] void lack_thread(const std::system_error& error);

  // Finishes what is queued and leaves the group; the second time nothing. Throws what a signal handler raises
  // meanwhile, once all has ended. With an `error` by which the program ends nothing is finished that takes longer than
  // `patience`: others may wait for what this rank will not do any more, and they hear why.
  void end(const std::string& error = "", std::chrono::milliseconds patience = {});

  // The two halves of it. False: there is nothing to leave any more, or not by this process.
  bool finish(const std::string& error, std::chrono::milliseconds patience, std::exception_ptr& interruption);
  void leave(const std::string& error) { engine_->stop(error); }

 private:
  void run_after(const std::function<std::string()>& where, const std::function<void()>& task);

  const std::shared_ptr<Engine> engine_;
  const std::shared_ptr<DeviceGroup> device_;
  std::atomic<bool> over_{false};
  Runner runner_;
};

}  // namespace torchtp::backend
