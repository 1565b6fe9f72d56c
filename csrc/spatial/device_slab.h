#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "core/interval.h"
#include "exchange/device_exchange.h"

namespace torchtp::spatial {

// Rows (local coordinates) of a dense tensor's dim as a message between devices, and as the place where one goes. They
// hold the tensor.
exchange::DeviceSend send_slab(const at::Tensor& tensor, int64_t dim, const Interval& rows, int peer);
exchange::DeviceReceive receive_slab(const at::Tensor& tensor, int64_t dim, const Interval& rows, int peer);
exchange::DeviceReceive add_slab(const at::Tensor& tensor, int64_t dim, const Interval& rows, int peer);
// Of dense tensors of one layout that are stacked along another dim.
exchange::DeviceSend send_stacked(const std::vector<at::Tensor>& stacked, int64_t stacked_dim, int64_t dim,
                                  const Interval& rows, int peer);
// A message of the size of these rows that stays where it arrives.
exchange::DeviceReceive leave_slab(const at::Tensor& like, int64_t dim, int64_t num_rows, int64_t stacked_dim,
                                   int64_t along_stack, int peer);

}  // namespace torchtp::spatial
