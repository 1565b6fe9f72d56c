#pragma once

#include "kernels/depthwise_any.h"
#include "kernels/depthwise_known.h"
#include "kernels/depthwise_weight_grad.h"
#include "kernels/depthwise_weight_tile.h"
#include "kernels/depthwise_weight_wide.h"
#include "kernels/split_sum.h"

// Which program computes the gradient of the filters; see depthwise_plan.h for Run.
namespace torchtp::kernels {

// Any kernel, stride and dilation: one tap of one channel over the output rows of one split.
template <typename T, bool kChannelsLast>
struct DepthwiseWeightAny {
  HaloPlanes<T> in;
  HaloPlanes<T> grad_out;
  float* partial;  // [splits, C, taps]
  DepthwiseParams params;
  int32_t splits;

  TORCHTP_HOST_DEVICE int32_t taps() const { return params.y.kernel * params.x.kernel; }
  TORCHTP_HOST_DEVICE int32_t rows() const { return grad_out.end_row() - grad_out.first_row(); }
  int64_t total() const { return int64_t{splits} * params.channels * taps(); }
  TORCHTP_HOST_DEVICE void operator()(int64_t index) const {
    // Neighbouring threads read neighbours in memory: taps of a row, or channels.
    const int64_t of_split = int64_t{params.channels} * taps();
    const int64_t split = index / of_split, rest = index % of_split;
    const auto c = static_cast<int32_t>(kChannelsLast ? rest % params.channels : rest / taps());
    const auto tap = static_cast<int32_t>(kChannelsLast ? rest / params.channels : rest % taps());
    const int32_t ky = tap / params.x.kernel, kx = tap % params.x.kernel;
    const int64_t units = params.batches * rows();
    float sum = 0;
    for (int64_t unit = units * split / splits; unit < units * (split + 1) / splits; ++unit) {
      const int64_t n = unit / rows();
      const int32_t y = grad_out.first_row() + static_cast<int32_t>(unit % rows());
      const int32_t in_y = y * params.y.stride + ky * params.y.dilation - params.y.offset;
      if (in_y < in.first_row() || in_y >= in.end_row()) continue;
      for (int32_t x = grad_out.first_column(); x < grad_out.end_column(); ++x) {
        const int32_t in_x = x * params.x.stride + kx * params.x.dilation - params.x.offset;
        sum += halo_at<T, kChannelsLast>(grad_out, n, c, y, x) * halo_at<T, kChannelsLast>(in, n, c, in_y, in_x);
      }
    }
    partial[(split * params.channels + c) * taps() + tap] = sum;
  }

  static int32_t splits_of(const DepthwiseParams& params) {
    const int64_t each = int64_t{params.channels} * params.y.kernel * params.x.kernel;
    const int64_t most = params.batches * params.out_height, enough = ((int64_t{1} << 18) + each - 1) / each;
    const int64_t splits = most < enough ? most : enough;
    return static_cast<int32_t>(splits > 0 ? splits : 1);
  }
};

template <int kKernel, int kStride, bool kChannelsLast, typename T>
auto weight_tile(const HaloPlanes<T>& in, const HaloPlanes<T>& grad_out, float* scratch, const DepthwiseParams& params,
                 size_t most_shared) {
  using Tile = DepthwiseWeightTile<T, kKernel, kStride, kChannelsLast>;
  const Steps steps{params.y.dilation, params.x.dilation};
  if (kStride > 1 || !grad_out.has_halo()) {
    return Tile::make(grad_out, in, scratch, params.batches, params.y.offset, params.x.offset, steps, false,
                      most_shared);
  }
  const DepthwiseParams back = input_grad_as_forward(params);
  return Tile::make(in, grad_out, scratch, params.batches, back.y.offset, back.x.offset, steps, true, most_shared);
}

template <bool kChannelsLast, typename T>
DepthwiseWeightWide<T, kChannelsLast> weight_wide(const HaloPlanes<T>& in, const HaloPlanes<T>& grad_out,
                                                  float* scratch, const DepthwiseParams& params) {
  using Wide = DepthwiseWeightWide<T, kChannelsLast>;
  const DepthwiseParams back = input_grad_as_forward(params);
  return grad_out.has_halo() ? Wide::make(in, grad_out, scratch, params, back.y.offset, back.x.offset, true)
                             : Wide::make(grad_out, in, scratch, params, params.y.offset, params.x.offset, false);
}

template <bool kChannelsLast, typename T, typename Run>
int32_t run_weight_splits_in(const Run& run, const HaloPlanes<T>& in, const HaloPlanes<T>& grad_out, float* scratch,
                             const DepthwiseParams& params) {
  const HaloPlanes<T>& points = grad_out.has_halo() ? in : grad_out;
  if (params.batches * params.channels * points.height * points.width == 0) return 0;
  const bool both = in.has_halo() && grad_out.has_halo();
  int32_t splits = 0;
  const auto tile = [&](auto kernel, auto stride) {
    const auto program = weight_tile<decltype(kernel)::value, decltype(stride)::value, kChannelsLast>(
        in, grad_out, scratch, params, run.most_shared);
    run.program(program);
    splits = program.splits;
  };
  if ((!both && with_known_kernel<1>(params, tile)) || with_known_kernel<2>(params, tile)) return splits;
  if (!both && params.y.stride == 1 && params.x.stride == 1) {
    const auto wide = weight_wide<kChannelsLast>(in, grad_out, scratch, params);
    if (wide.fits(run.most_shared)) {
      run.program(wide);
      return wide.splits;
    }
  }
  using Any = DepthwiseWeightAny<T, kChannelsLast>;
  const Any any{in, grad_out, scratch, params, Any::splits_of(params)};
  run.each(any);
  return any.splits;
}

// The first stage: the number of splits that it leaves in `scratch`.
template <typename T, typename Run>
int32_t run_weight_splits(const Run& run, const HaloPlanes<T>& in, const HaloPlanes<T>& grad_out, float* scratch,
                          const DepthwiseParams& params) {
  return params.channels_last ? run_weight_splits_in<true>(run, in, grad_out, scratch, params)
                              : run_weight_splits_in<false>(run, in, grad_out, scratch, params);
}

template <typename T, typename Run>
void run_depthwise_weight_grad(const Run& run, const HaloPlanes<T>& in, const HaloPlanes<T>& grad_out, T* grad_weight,
                               float* scratch, const DepthwiseParams& params) {
  const int64_t count = int64_t{params.channels} * params.y.kernel * params.x.kernel;
  const int32_t splits = run_weight_splits(run, in, grad_out, scratch, params);
  run.program(SplitSum<T>{scratch, grad_weight, count, splits});
}

}  // namespace torchtp::kernels
