#pragma once

#include <string>
#include <vector>

namespace torchtp::exchange {

// How halos of a device's tensors travel: through each other's memory, by grouped point-to-point calls, by way of the
// host, or not at all (for benchmarks). kAuto: the first of these that all ranks' devices can do.
enum class DeviceKind { kAuto, kPeerMemory, kGrouped, kStaged, kNone };

const char* name_of(DeviceKind kind);
// "auto", "peer_memory", "grouped", "staged", "none"; throws torchtp::Error, naming `what`, for any other.
DeviceKind device_kind_of(const std::string& name, const std::string& what);

// What one rank knows of itself.
struct DeviceFacts {
  std::string host;                    // of this boot of this machine
  std::string device;                  // its bus address
  std::vector<std::string> seen;       // devices this process sees
  std::vector<std::string> reachable;  // of these, whose memory this device can read and write
  bool symmetric_memory = false;
  bool shares_devices = false;  // TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES
  bool grouped = false;         // the group's backend moves this device's tensors
  DeviceKind wish = DeviceKind::kAuto;

  std::string packed() const;
  static DeviceFacts unpacked(const std::string& text);
};

// The same on every rank, from what all of them know. `why` says what keeps better ones from being used.
struct DeviceChoice {
  DeviceKind kind;
  std::string why;
};
// Throws torchtp::Error when the ranks wish for different kinds, or for one that they cannot do.
DeviceChoice choose(const std::vector<DeviceFacts>& ranks, bool without_peer_memory = false);

}  // namespace torchtp::exchange
