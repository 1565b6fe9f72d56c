#include "spatial/depthwise_layer_norm.h"

#include <ATen/Dispatch_v2.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/Exception.h>

#include "kernels/depthwise_layer_norm.h"
#include "kernels/narrow.h"
#include "spatial/checks.h"
#include "spatial/depthwise.h"
#include "spatial/device.h"
#include "spatial/factors.h"
#include "spatial/layer_norm_channels_first.h"
#include "spatial/slab.h"
#include "spatial/surroundings.h"
#ifdef TORCHTP_CUDA
#include "kernels/depthwise_layer_norm_cuda.h"
#endif

namespace torchtp::spatial {
namespace {

using kernels::DepthwiseLayerNormArgs;
using kernels::HaloPlanes;
using kernels::narrow;
using kernels::Part;
using Four = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using Optional = std::optional<at::Tensor>;

at::Tensor not_kept(const at::Tensor& like) { return at::empty({0}, like.options()); }

void check(const char* op, const at::Tensor& input, const at::Tensor& weight, const Optional& bias,
           const ConvolutionParams& params, const ChannelNorm& norm, const std::vector<Cut>& cuts) {
  TORCH_CHECK_VALUE(input.dim() == 4, op, ": input is [N, C, H, W], got ", input.dim(), " dims");
  const int64_t channels = input.size(1);
  TORCH_CHECK_VALUE(weight.dim() == 4 && weight.size(0) == channels && weight.size(1) == 1, op,
                    ": weight is one filter a channel, [", channels, ", 1, kernel, kernel], got ", weight.sizes());
  check_row(op, "bias", bias, input);
  check_row(op, "norm_weight", norm.weight, input);
  check_row(op, "norm_bias", norm.bias, input);
  check_convolution(op, input, weight, bias, params, cuts);
}

template <typename T>
void run(const HaloPlanes<T>& planes, const DepthwiseLayerNormArgs<T>& args, const kernels::DepthwiseParams& params,
         Part part, [[maybe_unused]] const at::Tensor& out) {
#ifdef TORCHTP_CUDA
  if (is_on_device(out)) {
    const OnDevice device(out);
    kernels::launch_depthwise_layer_norm(planes, args, params, part, device.stream());
    return;
  }
#endif
  kernels::depthwise_layer_norm_cpu(planes, args, params, part);
}

kernels::DepthwiseParams numbers_of(const at::Tensor& input, const at::Tensor& weight,
                                    const ConvolutionParams& params) {
  const auto axis = [&](int64_t index) {
    return kernels::DepthwiseAxis{narrow(weight.size(index + 2)), narrow(params.stride[index]),
                                  narrow(params.dilation[index])};
  };
  const bool channels_last = input.suggest_memory_format() == at::MemoryFormat::ChannelsLast;
  return {input.size(0), narrow(input.size(1)), 0, 0, 0, 0, axis(0), axis(1), channels_last};
}

}  // namespace

Four depthwise_layer_norm(const at::Tensor& input, const at::Tensor& weight, const Optional& bias,
                          const ConvolutionParams& params, const ChannelNorm& norm, bool keep,
                          const std::vector<Cut>& cuts) {
  check("depthwise_layer_norm", input, weight, bias, params, norm, cuts);
  const at::Tensor x = dense(input);
  const at::Tensor convolved = convolution(x, weight, bias, params, cuts);
  const auto [out, mean, rstd] = layer_norm_channels_first(convolved, norm.weight, norm.bias, norm.eps);
  return {out, keep ? convolved : not_kept(x), mean, rstd};
}

Four depthwise_layer_norm_pieces(const at::Tensor& input, const at::Tensor& weight, const Optional& bias,
                                 const ConvolutionParams& params, const ChannelNorm& norm, bool keep,
                                 const std::vector<Cut>& cuts) {
  check("depthwise_layer_norm_pieces", input, weight, bias, params, norm, cuts);
  const at::Tensor x = dense(input), w = weight.contiguous();
  const auto format = x.suggest_memory_format();
  TORCH_CHECK_VALUE(x.size(1) > 0 && kernels::depthwise_layer_norm_fits(numbers_of(x, w, params), x.element_size(),
                                                                        most_shared_bytes(x)),
                    "depthwise_layer_norm_pieces: the kernel takes filters with a stride and "
                    "dilation of 1 whose window fits into a block's memory beside 32 positions of all channels");
  const at::Tensor b = factors(bias, x.scalar_type());
  const at::Tensor norm_weight = factors(norm.weight, at::kFloat), norm_bias = factors(norm.bias, at::kFloat);
  const DepthwiseOutput output = depthwise_output(x, w, params, cuts);
  Surroundings surroundings(x, format, cuts, output.wanted);
  const at::Tensor out = at::empty(output.sizes, x.options(), format);
  const at::Tensor convolved = keep ? at::empty_like(out) : not_kept(x);
  const at::Tensor mean = at::empty({output.sizes[0], output.sizes[2], output.sizes[3]}, x.options().dtype(at::kFloat));
  const at::Tensor rstd = at::empty_like(mean);
  AT_DISPATCH_V2(x.scalar_type(), "depthwise_layer_norm", AT_WRAP([&] {
                   const DepthwiseLayerNormArgs<scalar_t> args{w.const_data_ptr<scalar_t>(),
                                                               data_or_null<scalar_t>(b),
                                                               data_or_null<float>(norm_weight),
                                                               data_or_null<float>(norm_bias),
                                                               static_cast<float>(norm.eps),
                                                               out.mutable_data_ptr<scalar_t>(),
                                                               keep ? convolved.mutable_data_ptr<scalar_t>() : nullptr,
                                                               mean.mutable_data_ptr<float>(),
                                                               rstd.mutable_data_ptr<float>()};
                   inside_then_border<scalar_t>(surroundings, [&](Part part, const HaloPlanes<scalar_t>& planes) {
                     run(planes, args, output.params, part, out);
                   });
                 }),
                 at::kFloat, at::kHalf, at::kBFloat16);
  surroundings.release();
  return {out, convolved, mean, rstd};
}

}  // namespace torchtp::spatial
