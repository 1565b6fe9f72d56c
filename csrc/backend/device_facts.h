#pragma once

#ifdef TORCHTP_CUDA
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "exchange/device_choice.h"

namespace torchtp::backend {

// What this rank knows of itself; TORCHTP_DEVICE_EXCHANGE counts where `kind` is kAuto.
exchange::DeviceFacts facts_of(const c10::intrusive_ptr<c10d::ProcessGroup>& group, c10::Device device,
                               exchange::DeviceKind kind);

// Whether a graph captures the device's current stream.
bool is_capturing(c10::Device device);

}  // namespace torchtp::backend
#endif
