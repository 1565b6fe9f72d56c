#include "backend/device_group.h"

#include <utility>

#include "backend/gil.h"

namespace torchtp::backend {

DeviceGroup::DeviceGroup(Make make, std::string store_prefix)
    : store_prefix_(std::move(store_prefix)), make_(std::move(make)) {}

DeviceGroup::~DeviceGroup() { close(); }

// make_ takes Python's lock under the mutex: who waits for the mutex must not hold it, here and below.
DeviceGroup::BackendPtr DeviceGroup::get() {
  const GilRelease release;
  std::lock_guard<std::mutex> lock(mutex_);
  if (!made_) {
    TORCH_CHECK(make_, "torchtp: this process group carries no CUDA tensors; it was made without an inner backend");
    made_ = make_(store_prefix_);
  }
  return made_;
}

DeviceGroup::BackendPtr DeviceGroup::made() const {
  const GilRelease release;
  std::lock_guard<std::mutex> lock(mutex_);
  return made_;
}

void DeviceGroup::abort() noexcept {
  const BackendPtr inner = made();
  if (!inner) return;
  try {
    inner->abort();
  } catch (const std::exception& error) {
    TORCH_WARN("torchtp: the inner backend ", inner->getBackendName(), " could not be aborted: ", error.what());
  }
}

void DeviceGroup::close() {
  const GilRelease release;
  BackendPtr inner;
  Make make;  // dropped outside of the mutex: that takes Python's lock too
  {
    std::lock_guard<std::mutex> lock(mutex_);
    inner = std::move(made_);
    make = std::move(make_);
    make_ = nullptr;
  }
  if (!inner) return;
  try {
    inner->shutdown();
  } catch (const std::exception& error) {
    TORCH_WARN("torchtp: the inner backend ", inner->getBackendName(), " did not shut down well: ", error.what());
  }
}

}  // namespace torchtp::backend
