#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "spatial/convolution.h"

// Which rows of which tensor every rank of a cut needs for a convolution.
namespace torchtp::spatial {

// The window of spatial dim `index` (0 = first).
Window window_of(const ConvolutionParams& params, const at::Tensor& weight, size_t index);

// interval_of() of what each rank owns of `extent`.
template <typename F>
std::vector<Interval> map_shards(const Cut& cut, int64_t extent, const F& interval_of) {
  std::vector<Interval> out = shards(cut, extent);
  for (Interval& interval : out) interval = interval_of(interval);
  return out;
}

// Rows of the input that each rank's rows of the output read; may overhang.
std::vector<Interval> read_by_outputs(const Cut& cut, const Window& window);
// Rows of the output that read any of each rank's rows of the input; of the output's `extent`.
std::vector<Interval> readers_of_inputs(const Cut& cut, const Window& window, int64_t extent);

}  // namespace torchtp::spatial
