#pragma once

#include <cstddef>
#include <cstdint>

#include "core/host_device.h"

// Where the bytes of a halo lie: strided in a tensor, dense in a message's payload.
namespace torchtp::kernels {

// `outer` times `rows` runs of contiguous bytes. In the payload the runs of one outer follow each other; the outers lie
// payload_stride apart, so that a payload can be put together from several slabs (tensors stacked along a dim).
struct HaloSlab {
  std::byte* data = nullptr;  // the first run
  int64_t outer = 0, rows = 0, run_bytes = 0;
  int64_t outer_stride = 0, row_stride = 0;       // bytes, in the tensor
  int64_t payload_begin = 0, payload_stride = 0;  // bytes, in the payload

  int64_t outer_bytes() const { return rows * run_bytes; }
  int64_t num_bytes() const { return outer * outer_bytes(); }
};

constexpr int64_t kMostSlabUnits = (int64_t{1} << 31) - (int64_t{1} << 20);

// The largest power of two, at most 16, that divides every number and address a copy of the slab steps by.
inline int64_t unit_of(const HaloSlab& slab, const std::byte* payload) {
  const uint64_t all = reinterpret_cast<uintptr_t>(slab.data) | reinterpret_cast<uintptr_t>(payload) |
                       static_cast<uint64_t>(slab.run_bytes | slab.payload_begin) |
                       static_cast<uint64_t>(slab.rows > 1 ? slab.row_stride : 0) |
                       static_cast<uint64_t>(slab.outer > 1 ? slab.outer_stride | slab.payload_stride : 0) | 16;
  return static_cast<int64_t>(all & (~all + 1));
}

}  // namespace torchtp::kernels
