#include "spatial/depthwise_steps.h"

#include <ATen/Dispatch_v2.h>
#include <ATen/Parallel.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>

#include "kernels/depthwise_weight_rows.h"
#include "spatial/depthwise.h"
#include "spatial/onednn.h"
#include "spatial/slab.h"

namespace torchtp::spatial {

namespace {

// Channels done by one task: what is laid out for them serves all.
constexpr int64_t kChannelsGrain = 16;

bool fast_in_aten(const at::Tensor& input, const at::Tensor& weight, const ConvolutionParams& params) {
  const auto at_most = [](at::IntArrayRef numbers, int64_t most) {
    return std::all_of(numbers.begin(), numbers.end(), [&](int64_t number) { return number <= most; });
  };
  return input.scalar_type() != at::kHalf && onednn_takes(input) && at_most(weight.sizes().slice(2), 3) &&
         at_most(params.padding, 1) && at_most(params.dilation, 1);
}

bool on_cpu(const at::Tensor& input, const at::Tensor& weight, const ConvolutionParams& params) {
  return input.is_cpu() && at::isFloatingType(input.scalar_type()) && has_filter_each(input, weight, params);
}

int64_t mirrored_padding(const at::Tensor& weight, const ConvolutionParams& params, size_t index) {
  return params.dilation[index] * (weight.size(static_cast<int64_t>(index) + 2) - 1) - params.padding[index];
}

}  // namespace

bool has_weight_rows(const at::Tensor& input, const at::Tensor& weight, const ConvolutionParams& params) {
  return on_cpu(input, weight, params) && !fast_in_aten(input, weight, params);
}

at::Tensor weight_rows(const at::Tensor& grad_output, const at::Tensor& input, const at::Tensor& weight,
                       const ConvolutionParams& params) {
  const at::Tensor x = dense(input), dy = grad_output.contiguous(x.suggest_memory_format());
  const at::Tensor dw = at::empty(weight.sizes(), weight.options());
  const kernels::DepthwiseParams numbers = depthwise_params(x, dy.sizes(), weight, params, {});
  AT_DISPATCH_V2(x.scalar_type(), "weight_rows", AT_WRAP([&] {
                   at::parallel_for(0, numbers.channels, kChannelsGrain, [&](int64_t begin, int64_t end) {
                     kernels::depthwise_weight_rows(x.const_data_ptr<scalar_t>(), dy.const_data_ptr<scalar_t>(),
                                                    dw.mutable_data_ptr<scalar_t>(), numbers, begin, end);
                   });
                 }),
                 AT_EXPAND(AT_FLOATING_TYPES), at::kHalf, at::kBFloat16);
  return dw;
}

bool pays_mirrored(const at::Tensor& input, const at::Tensor& weight, const ConvolutionParams& params) {
  if (!on_cpu(input, weight, params) || input.scalar_type() != at::kFloat) return false;
  bool dilated = false;
  for (size_t index = 0; index < 2; ++index) {
    if (params.stride[index] != 1 || mirrored_padding(weight, params, index) < 0) return false;
    dilated |= params.dilation[index] > 1;
  }
  return dilated;
}

at::Tensor mirrored_convolution(const at::Tensor& grad_output, const at::Tensor& weight,
                                const ConvolutionParams& params) {
  const std::array<int64_t, 2> padding{mirrored_padding(weight, params, 0), mirrored_padding(weight, params, 1)};
  return at::convolution(grad_output, weight.flip({2, 3}), {}, params.stride, padding, params.dilation, false, {0, 0},
                         params.groups);
}

}  // namespace torchtp::spatial
