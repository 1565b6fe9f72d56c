#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "core/interval.h"
#include "exchange/exchange.h"

namespace torchtp::spatial {

// The tensor in one of the dense layouts that slabs are cut from: contiguous or channels_last.
at::Tensor dense(const at::Tensor& tensor);

// Rows (local coordinates) of a dense tensor's dim as a message, and as the place where one goes. They hold the tensor.
exchange::Send send_rows(const at::Tensor& tensor, int64_t dim, const Interval& rows, int peer);
exchange::Receive receive_rows(const at::Tensor& tensor, int64_t dim, const Interval& rows, int peer);
exchange::Receive add_rows(const at::Tensor& tensor, int64_t dim, const Interval& rows, int peer);

}  // namespace torchtp::spatial
