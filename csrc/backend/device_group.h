#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <functional>
#include <mutex>
#include <string>

namespace torchtp::backend {

// The inner backend that carries out calls on tensors of a device: NCCL on CUDA. Made in Python, when the first such
// tensor comes; making it must wait for no other rank. Thread-safe.
class DeviceGroup {
 public:
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
  using Make = std::function<BackendPtr(const std::string& store_prefix)>;

  DeviceGroup(Make make, std::string store_prefix);
  ~DeviceGroup();
  DeviceGroup(const DeviceGroup&) = delete;
  DeviceGroup& operator=(const DeviceGroup&) = delete;

  // Which tensors are its: those on CUDA, unless a test lets it have those on the CPU.
  void set_device(c10::DeviceType type) { type_ = type; }
  bool takes(const c10::Device& device) const { return device.type() == type_; }
  // For a test: another backend is there in place of NCCL.
  bool stands_in() const { return type_ != c10::DeviceType::CUDA; }

  BackendPtr get();         // throws when it cannot be made here
  BackendPtr made() const;  // null before get(), and after close()

  void abort() noexcept;
  void close();  // waits for what is under way; without Python's lock

 private:
  const std::string store_prefix_;
  std::atomic<c10::DeviceType> type_{c10::DeviceType::CUDA};
  mutable std::mutex mutex_;  // of the members below
  Make make_;
  BackendPtr made_;
};

}  // namespace torchtp::backend
