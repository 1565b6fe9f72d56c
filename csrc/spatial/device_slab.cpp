#include "spatial/device_slab.h"

#include <ATen/ops/cat.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "spatial/slab_place.h"

namespace torchtp::spatial {
namespace {

using kernels::HaloMerge;

std::shared_ptr<const void> hold(const at::Tensor& tensor) { return std::make_shared<at::Tensor>(tensor); }

HaloMerge sum_of(at::ScalarType type) {
  switch (type) {
    case at::kBool:  // of which each row comes once
    case at::kByte:
    case at::kChar:
      return HaloMerge::kInt8;
    case at::kShort:
      return HaloMerge::kInt16;
    case at::kInt:
      return HaloMerge::kInt32;
    case at::kLong:
      return HaloMerge::kInt64;
    case at::kHalf:
      return HaloMerge::kHalf;
    case at::kBFloat16:
      return HaloMerge::kBFloat16;
    case at::kFloat:
    case at::kComplexFloat:
      return HaloMerge::kFloat;
    case at::kDouble:
    case at::kComplexDouble:
      return HaloMerge::kDouble;
    default:
      TORCH_CHECK_NOT_IMPLEMENTED(false, "push_add: halos of ", type, " cannot be added on a device");
  }
}

// Of a slab with these sizes in the tensor's layout.
kernels::HaloLayout layout_of_slab(const at::Tensor& tensor, const std::vector<int64_t>& sizes) {
  kernels::HaloLayout layout;
  layout.layout = layout_number(tensor);
  layout.channels_last = !tensor.is_contiguous();
  layout.element_bytes = static_cast<uint32_t>(tensor.element_size());
  if (tensor.dim() < 4) return layout;  // there is but one
  layout.channels = sizes[1];
  for (size_t dim = 2; dim < sizes.size(); ++dim) layout.positions *= sizes[dim];
  return layout;
}

int64_t bytes_from(const at::Tensor& tensor, int64_t begin, int64_t end) {
  int64_t bytes = tensor.element_size();
  for (int64_t dim = begin; dim < end; ++dim) bytes *= tensor.size(dim);
  return bytes;
}

}  // namespace

exchange::DeviceSend send_slab(const at::Tensor& tensor, int64_t dim, const Interval& rows, int peer) {
  const kernels::HaloSlab slab = halo_slab(tensor, dim, rows);
  return {peer, layout_number(tensor), slab.num_bytes(), {slab}, hold(tensor)};
}

exchange::DeviceReceive receive_slab(const at::Tensor& tensor, int64_t dim, const Interval& rows, int peer) {
  exchange::DeviceReceive receive;
  receive.peer = peer;
  receive.slab = halo_slab(tensor, dim, rows);
  receive.num_bytes = receive.slab.num_bytes();
  std::vector<int64_t> sizes = tensor.sizes().vec();
  sizes[dim] = rows.size();
  receive.layout = layout_of_slab(tensor, sizes);
  receive.rows = rows;
  receive.memory = hold(tensor);
  return receive;
}

exchange::DeviceReceive add_slab(const at::Tensor& tensor, int64_t dim, const Interval& rows, int peer) {
  exchange::DeviceReceive receive = receive_slab(tensor, dim, rows, peer);
  receive.merge = sum_of(tensor.scalar_type());
  return receive;
}

exchange::DeviceSend send_stacked(const std::vector<at::Tensor>& stacked, int64_t stacked_dim, int64_t dim,
                                  const Interval& rows, int peer) {
  if (stacked.size() == 1) return send_slab(stacked.front(), dim, rows, peer);
  // A piece of one row or channel may be in either layout; any other one tells.
  const auto telling =
      std::find_if(stacked.begin(), stacked.end(), [](const at::Tensor& piece) { return !piece.is_contiguous(); });
  const bool last = telling != stacked.end();
  const at::Tensor& like = last ? *telling : stacked.front();
  if (stacked_dim < 2 || stacked_dim >= dim) {
    std::vector<at::Tensor> parts;
    for (const at::Tensor& tensor : stacked) parts.push_back(tensor.narrow(dim, rows.begin, rows.size()));
    const at::Tensor slab = at::cat(parts, stacked_dim).contiguous(like.suggest_memory_format());
    return send_slab(slab, dim, {0, rows.size()}, peer);
  }
  exchange::DeviceSend send{peer, layout_number(like), 0, {}, nullptr};
  const auto held = std::make_shared<std::vector<at::Tensor>>(stacked);
  send.memory = held;
  int64_t begin = 0;
  for (const at::Tensor& tensor : stacked) {
    const int64_t row = bytes_from(tensor, dim + 1, tensor.dim()) * (last ? tensor.size(1) : 1);
    kernels::HaloSlab slab;
    slab.run_bytes = rows.size() * row;
    slab.row_stride = tensor.size(dim) * row;
    slab.rows = bytes_from(tensor, stacked_dim, dim) / tensor.element_size();
    slab.outer =
        tensor.size(0) * bytes_from(tensor, 2, stacked_dim) / tensor.element_size() * (last ? 1 : tensor.size(1));
    slab.outer_stride = slab.rows * slab.row_stride;
    slab.data = static_cast<std::byte*>(tensor.data_ptr()) + rows.begin * row;
    slab.payload_begin = begin;
    begin += slab.outer_bytes();
    send.num_bytes += slab.num_bytes();
    send.slabs.push_back(slab);
  }
  for (kernels::HaloSlab& slab : send.slabs) slab.payload_stride = begin;
  return send;
}

exchange::DeviceReceive leave_slab(const at::Tensor& like, int64_t dim, int64_t num_rows, int64_t stacked_dim,
                                   int64_t along_stack, int peer) {
  exchange::DeviceReceive receive;
  receive.peer = peer;
  std::vector<int64_t> sizes = like.sizes().vec();
  sizes[stacked_dim] = along_stack;
  sizes[dim] = num_rows;
  receive.num_bytes = like.element_size();
  for (const int64_t size : sizes) receive.num_bytes *= size;
  receive.layout = layout_of_slab(like, sizes);
  return receive;
}

}  // namespace torchtp::spatial
