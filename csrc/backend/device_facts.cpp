#include "backend/device_facts.h"

#ifdef TORCHTP_CUDA
#include <c10/cuda/CUDAStream.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <string>

#include "backend/symmetric_memory.h"
#include "core/cuda_memory.h"

namespace torchtp::backend {
namespace {

std::string this_boot() {
  std::string id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
  char name[256] = {};
  gethostname(name, sizeof(name) - 1);
  return id + " " + name;
}

std::string bus_of(int device) {
  char text[64] = {};
  require_cuda(cudaDeviceGetPCIBusId(text, sizeof(text), device), "a device's bus address");
  return text;
}

// gloo takes no device's tensors in point-to-point calls.
bool moves_tensors(const c10::intrusive_ptr<c10d::ProcessGroup>& group, c10::DeviceType type) {
  try {
    return group->getBackend(type)->getBackendName() != "gloo";
  } catch (const std::exception&) {  // no backend for this device
    return false;
  }
}

}  // namespace

exchange::DeviceFacts facts_of(const c10::intrusive_ptr<c10d::ProcessGroup>& group, c10::Device device,
                               exchange::DeviceKind kind) {
  exchange::DeviceFacts facts;
  facts.host = this_boot();
  facts.device = bus_of(device.index());
  int count = 0;
  require_cuda(cudaGetDeviceCount(&count), "the number of devices");
  for (int other = 0; other < count; ++other) {
    facts.seen.push_back(bus_of(other));
    int can = 0;
    if (other != device.index()) require_cuda(cudaDeviceCanAccessPeer(&can, device.index(), other), "peer access");
    if (can != 0) facts.reachable.push_back(facts.seen.back());
  }
  facts.symmetric_memory = has_symmetric_memory();
  const char* const shares = std::getenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES");
  facts.shares_devices = shares != nullptr && std::string(shares) == "1";
  facts.grouped = moves_tensors(group, device.type());
  const char* const wish = std::getenv("TORCHTP_DEVICE_EXCHANGE");
  facts.wish = kind == exchange::DeviceKind::kAuto && wish != nullptr && *wish != 0
                   ? exchange::device_kind_of(wish, "TORCHTP_DEVICE_EXCHANGE")
                   : kind;
  return facts;
}

bool is_capturing(c10::Device device) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(c10::cuda::getCurrentCUDAStream(device.index()), &status) != cudaSuccess) {
    cudaGetLastError();
  }
  return status == cudaStreamCaptureStatusActive;
}

}  // namespace torchtp::backend
#endif
