#include "spatial/convolution_geometry.h"

#include <algorithm>

namespace torchtp::spatial {

Window window_of(const ConvolutionParams& params, const at::Tensor& weight, size_t index) {
  return {weight.size(static_cast<int64_t>(index) + 2), params.stride[index], params.padding[index],
          params.dilation[index]};
}

std::vector<Interval> read_by_outputs(const Cut& cut, const Window& window) {
  return map_shards(cut, output_extent(window, cut.extent), [&](const Interval& out) { return read_by(out, window); });
}

std::vector<Interval> readers_of_inputs(const Cut& cut, const Window& window, int64_t extent) {
  return map_shards(cut, cut.extent,
                    [&](const Interval& own) { return intersect(readers_of(own, window), Interval{0, extent}); });
}

LocalBackward fit_backward(const Interval& own, const Interval& dy, const Window& window) {
  const int64_t left = window.padding + own.begin - window.stride * dy.begin;
  int64_t zeros = std::max<int64_t>(0, ceil_div(-left, window.stride));
  for (;; ++zeros) {
    const int64_t padding = left + zeros * window.stride;
    const int64_t extent = output_extent({window.kernel, window.stride, padding, window.dilation}, own.size());
    if (extent < zeros + dy.size()) continue;
    const int64_t begin = dy.begin - zeros;
    // NOTE [one output has no stride]; without it there is room for more, of zeros
    if (extent == 1) return {{begin, begin + own.size() + 2 * padding - window.reach()}, padding, 1};
    return {{begin, begin + extent}, padding, window.stride};
  }
}

}  // namespace torchtp::spatial
