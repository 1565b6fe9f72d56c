#include "gradients/instant.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <chrono>

namespace torchtp::gradients {

Instant Instant::now(const c10::Device& device) {
  Instant instant;
  instant.host_ = std::chrono::steady_clock::now().time_since_epoch().count();
  if (device.is_cpu()) return instant;
  instant.event_ = std::make_shared<c10::Event>(device.type(), c10::EventFlag::BACKEND_DEFAULT);
  instant.event_->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  return instant;
}

int64_t Instant::after(const Instant& other) const {
  if (!event_ || !other.event_ || event_->device() != other.event_->device()) return host_ - other.host_;
  event_->synchronize();
  other.event_->synchronize();
  return static_cast<int64_t>(other.event_->elapsedTime(*event_) * 1e6);
}

void LaterInstant::set(const Instant& instant) {
  const std::lock_guard<std::mutex> lock(mutex_);
  instant_ = instant;
}

std::optional<Instant> LaterInstant::get() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return instant_;
}

}  // namespace torchtp::gradients
