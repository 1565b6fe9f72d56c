#pragma once

#include <cstddef>
#include <cstdint>

#include "core/host_device.h"

namespace torchtp::kernels {

// Up to two slabs (one for each neighbour) of the middle dim of a contiguous [outer, extent, inner]. Packed they lie
// one after the other, each as a contiguous [outer, depth, inner]. A depth of 0 leaves a side out. Counts are in
// elements.
struct HaloSlabs {
  int64_t outer, extent, inner;
  int64_t start[2];
  int64_t depth[2];

  TORCHTP_HOST_DEVICE int64_t packed_elements(int side) const { return outer * depth[side] * inner; }
  TORCHTP_HOST_DEVICE int64_t packed_elements() const { return packed_elements(0) + packed_elements(1); }

  // Where element `packed` of the packed slabs lies in the tensor.
  TORCHTP_HOST_DEVICE int64_t tensor_index(int64_t packed) const {
    const int64_t first = packed_elements(0);
    const bool second = packed >= first;  // no array is indexed by it: a kernel would spill the slabs to memory
    const int64_t in_slab = second ? packed - first : packed;
    const int64_t run = (second ? depth[1] : depth[0]) * inner;
    return (in_slab / run * extent + (second ? start[1] : start[0])) * inner + in_slab % run;
  }
};

// The work of one element. It moves bytes, so T only has to have the size of the element.
template <typename T>
struct HaloPack {
  const T* tensor;
  T* packed;
  HaloSlabs slabs;
  TORCHTP_HOST_DEVICE void operator()(int64_t i) const { packed[i] = tensor[slabs.tensor_index(i)]; }
};

template <typename T>
struct HaloUnpack {
  const T* packed;
  T* tensor;
  HaloSlabs slabs;
  TORCHTP_HOST_DEVICE void operator()(int64_t i) const { tensor[slabs.tensor_index(i)] = packed[i]; }
};

// An element of 16 bytes (complex128), or two or more smaller ones side by side.
struct alignas(16) Bytes16 {
  uint64_t low, high;
};

// Calls f with a value of the unsigned type of `element_bytes` (1, 2, 4, 8 or 16) bytes; false for any other size.
template <typename F>
bool dispatch_element_bytes(size_t element_bytes, F&& f) {
  switch (element_bytes) {
    case 1:
      f(uint8_t{});
      return true;
    case 2:
      f(uint16_t{});
      return true;
    case 4:
      f(uint32_t{});
      return true;
    case 8:
      f(uint64_t{});
      return true;
    case 16:
      f(Bytes16{});
      return true;
    default:
      return false;
  }
}

void halo_pack_cpu(const void* tensor, void* packed, const HaloSlabs& slabs, size_t element_bytes);
void halo_unpack_cpu(const void* packed, void* tensor, const HaloSlabs& slabs, size_t element_bytes);

}  // namespace torchtp::kernels
