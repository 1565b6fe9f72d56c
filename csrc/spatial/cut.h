#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "backend/exchanges.h"
#include "core/interval.h"

namespace torchtp::spatial {

// One tensor dim cut over the ranks of one group (one mesh axis).
struct Cut {
  int64_t dim;     // of the tensor, non-negative
  int64_t extent;  // global, of the op's input
  backend::SpatialGroup group;

  Interval own() const { return owned(extent, group.size, group.rank); }
};

// The three parallel lists of a schema (cut_dims, cut_extents, cut_groups) as one list. Throws when their lengths
// differ, a dim is out of range or named twice, or an extent is negative.
std::vector<Cut> make_cuts(at::IntArrayRef dims, at::IntArrayRef extents, const c10::List<std::string>& groups,
                           int64_t num_dims);

// Throws, on this rank alone, where local sizes are not what it owns of the cuts.
void check_shards(const char* op, at::IntArrayRef sizes, const std::vector<Cut>& cuts);

// Whether an op on meta tensors shall go through its pulls, so that they count their traffic.
bool planned(const std::vector<Cut>& cuts);

// The interval every rank of the cut's group gets of a dim of `extent`.
std::vector<Interval> shards(const Cut& cut, int64_t extent);

}  // namespace torchtp::spatial
