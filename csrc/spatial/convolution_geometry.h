#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "spatial/convolution.h"

// Which rows of which tensor every rank of a cut needs for a convolution.
//
// NOTE [one output has no stride]
// Where a part has one output in a dim, its stride there says nothing, and is taken as 1: for 16-bit numbers PyTorch's
// CPU convolutions (oneDNN; 2.13 and 2.15) read beyond an only output column with a stride, and narrow parts make
// such columns of images that have more. A transposed convolution has that in its backward, of an only input column
// (on processors with AMX its gradient is 0 or 1e36 there).
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

// Frame of dy, padding and stride that make ATen's convolution_backward fit to rows `own` of x and rows `dy` of the
// output's gradient. See NOTE [one local backward] in convolution.cpp.
struct LocalBackward {
  Interval frame;
  int64_t padding;
  int64_t stride;
};
LocalBackward fit_backward(const Interval& own, const Interval& dy, const Window& window);

}  // namespace torchtp::spatial
