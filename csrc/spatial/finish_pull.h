#pragma once

#include <ATen/core/Tensor.h>

#include "exchange/device_exchange.h"

namespace torchtp::spatial {

// The other half of a pull of a device's tensor, on its current stream.
void finish_pull_on(exchange::DeviceExchange& exchange, const at::Tensor& extended, uint64_t ticket);

}  // namespace torchtp::spatial
