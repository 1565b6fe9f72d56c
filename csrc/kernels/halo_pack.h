#pragma once

#include "kernels/halo_exchange.h"

namespace torchtp::kernels {

// Up to two slabs (one for each neighbour) of the middle dim of a contiguous [outer, extent, inner]. Packed they lie
// one after the other, each as a contiguous [outer, depth, inner]. A depth of 0 leaves a side out. Counts are in
// elements. What an exchange packs and lays, by itself: for checks and timings.
struct HaloSlabs {
  int64_t outer, extent, inner;
  int64_t start[2];
  int64_t depth[2];

  int64_t packed_elements(int side) const { return outer * depth[side] * inner; }
  int64_t packed_elements() const { return packed_elements(0) + packed_elements(1); }
};

inline HaloMoves moves_of(const void* tensor, const void* packed, const HaloSlabs& slabs, size_t element_bytes) {
  const auto element = static_cast<int64_t>(element_bytes);
  // Which of the two is written depends on the kernel that is given the moves.
  auto* const from = static_cast<std::byte*>(const_cast<void*>(tensor));
  auto* to = static_cast<std::byte*>(const_cast<void*>(packed));
  HaloMoves moves;
  for (int side = 0; side < 2; ++side) {
    HaloSlab slab;
    slab.data = from + slabs.start[side] * slabs.inner * element;
    slab.outer = 1;
    slab.rows = slabs.outer;
    slab.run_bytes = slabs.depth[side] * slabs.inner * element;
    slab.row_stride = slabs.extent * slabs.inner * element;
    moves.add(HaloMove::make(slab, to, 0, slab.num_bytes()));
    to += slab.num_bytes();
  }
  return moves;
}

inline HaloPack packing(const void* tensor, void* packed, const HaloSlabs& slabs, size_t element_bytes) {
  HaloPack pack;
  pack.moves = moves_of(tensor, packed, slabs, element_bytes);
  return pack;
}

inline HaloTakeParams unpacking(const void* packed, void* tensor, const HaloSlabs& slabs, size_t element_bytes) {
  HaloTakeParams params;
  params.moves = moves_of(tensor, packed, slabs, element_bytes);
  return params;
}

}  // namespace torchtp::kernels
