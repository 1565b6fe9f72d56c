#include "spatial/cut.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace torchtp::spatial {

std::vector<Cut> make_cuts(at::IntArrayRef dims, at::IntArrayRef extents, const c10::List<std::string>& groups,
                           int64_t num_dims) {
  TORCH_CHECK_VALUE(dims.size() == extents.size() && dims.size() == groups.size(),
                    "cut_dims, cut_extents and cut_groups need one entry for each cut dim, got ", dims.size(), ", ",
                    extents.size(), " and ", groups.size());
  std::vector<Cut> cuts;
  cuts.reserve(dims.size());
  for (size_t i = 0; i < dims.size(); ++i) {
    TORCH_CHECK_INDEX(0 <= dims[i] && dims[i] < num_dims, "cut dim ", dims[i], " is not a dim of a ", num_dims,
                      "-dimensional tensor");
    TORCH_CHECK_VALUE(std::find(dims.begin(), dims.begin() + i, dims[i]) == dims.begin() + i, "cut dim ", dims[i],
                      " is named twice, but it is cut over one group");
    TORCH_CHECK_VALUE(extents[i] >= 0, "cut dim ", dims[i], " has no negative extent, got ", extents[i]);
    cuts.push_back({dims[i], extents[i], backend::spatial_group(groups.get(i))});
  }
  return cuts;
}

void check_shards(const char* op, at::IntArrayRef sizes, const std::vector<Cut>& cuts) {
  for (const Cut& cut : cuts) {
    const int64_t rows = cut.own().size();
    TORCH_CHECK_VALUE(cut.dim < static_cast<int64_t>(sizes.size()) && sizes[cut.dim] == rows, op, ": dim ", cut.dim,
                      " of global extent ", cut.extent, " over ", cut.group.size, " ranks gives rank ", cut.group.rank,
                      " ", rows, " rows, but its input has sizes ", sizes);
  }
}

bool planned(const std::vector<Cut>& cuts) {
  return std::any_of(cuts.begin(), cuts.end(), [](const Cut& cut) { return cut.group.planned; });
}

std::vector<Interval> shards(const Cut& cut, int64_t extent) {
  std::vector<Interval> out(cut.group.size);
  for (int rank = 0; rank < cut.group.size; ++rank) out[rank] = owned(extent, cut.group.size, rank);
  return out;
}

}  // namespace torchtp::spatial
