#include "spatial/convolution_geometry.h"

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

}  // namespace torchtp::spatial
