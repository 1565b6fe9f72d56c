#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>

namespace torchtp::gradients {

// A point in time: of the host, and on a device of its stream, which gets there later.
class Instant {
 public:
  // On a device: when the stream that is current there has done what it has been given by now.
  static Instant now(const c10::Device& device);
  // By the clock that both have; waits for the device. Nanoseconds.
  int64_t after(const Instant& other) const;

 private:
  int64_t host_ = 0;
  std::shared_ptr<c10::Event> event_;
};

// Where another thread may leave an instant, once or never.
class LaterInstant {
 public:
  void set(const Instant& instant);
  std::optional<Instant> get() const;

 private:
  mutable std::mutex mutex_;
  std::optional<Instant> instant_;
};

}  // namespace torchtp::gradients
