#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "core/interval.h"
#include "exchange/exchange.h"

namespace torchtp::spatial {

// The tensor itself, said to be channels last where its memory is. Of one image the stride of the images may be
// anything, as in tokens.transpose(1, 2).view(1, C, H, W), and PyTorch takes that for no format at all: it would be
// copied.
at::Tensor with_format(const at::Tensor& tensor);

// The tensor in one of the dense layouts that slabs are cut from: contiguous or channels_last.
at::Tensor dense(const at::Tensor& tensor);

// As at::constant_pad_nd with zeros, whose list starts at the last dim: (before, after) each, negative to crop. The
// tensor itself where there is nothing to do.
at::Tensor padded(const at::Tensor& tensor, at::IntArrayRef pads);

// Writes rows of the dense tensor `to`, in one pass over it: from row `at` on `rows` of the dense tensor `from`, which
// is as large as `to` beside `dim`, and `fill` in `before` and `after`. All in local coordinates. On the CPU.
void lay_rows(const at::Tensor& from, const Interval& rows, const at::Tensor& to, int64_t at, const Interval& before,
              const Interval& after, int64_t dim, double fill);

// Rows (local coordinates) of a dense tensor's dim as a message, and as the place where one goes. They hold the tensor.
// `extent` is the global one of the dim, which both ranks must have: rows of another image may be as many.
exchange::Send send_rows(const at::Tensor& tensor, int64_t dim, const Interval& rows, int peer, int64_t extent);
exchange::Receive receive_rows(const at::Tensor& tensor, int64_t dim, const Interval& rows, int peer, int64_t extent);
exchange::Receive add_rows(const at::Tensor& tensor, int64_t dim, const Interval& rows, int peer, int64_t extent);

}  // namespace torchtp::spatial
