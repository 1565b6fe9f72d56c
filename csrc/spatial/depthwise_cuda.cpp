#include "spatial/depthwise_cuda.h"

#ifdef TORCHTP_CUDA
#include <ATen/Dispatch_v2.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "kernels/depthwise_cuda.h"
#include "kernels/depthwise_weight_grad_cuda.h"
#include "spatial/slab.h"

namespace torchtp::spatial {
namespace {

int32_t narrow(int64_t value) { return static_cast<int32_t>(value); }

kernels::DepthwiseParams params_of(const at::Tensor& input, at::IntArrayRef out_sizes, const at::Tensor& weight,
                                   const ConvolutionParams& params) {
  const auto axis = [&](int64_t index) {
    return kernels::DepthwiseAxis{narrow(weight.size(index + 2)), narrow(params.stride[index]),
                                  narrow(params.dilation[index]), narrow(params.padding[index])};
  };
  return {input.size(0),
          narrow(input.size(1)),
          narrow(input.size(2)),
          narrow(input.size(3)),
          narrow(out_sizes[2]),
          narrow(out_sizes[3]),
          axis(0),
          axis(1),
          input.suggest_memory_format() == at::MemoryFormat::ChannelsLast};
}

// No halo beside it: what was pulled lies in the tensor.
template <typename T>
kernels::HaloPlanes<T> planes(const at::Tensor& x) {
  kernels::HaloPlanes<T> out{};
  out.channels = narrow(x.size(1));
  out.height = narrow(x.size(2));
  out.width = narrow(x.size(3));
  out.own = x.const_data_ptr<T>();
  return out;
}

bool is_depthwise(const at::Tensor& input, const at::Tensor& weight, const ConvolutionParams& params) {
  return has_cuda_kernels(input) && input.dim() == 4 && weight.scalar_type() == input.scalar_type() &&
         !params.transposed && params.groups == input.size(1) && weight.size(0) == input.size(1) &&
         weight.size(1) == 1 && weight.size(2) <= 31 && weight.size(3) <= 31;
}

bool unit_steps(const ConvolutionParams& params) {
  return params.stride[0] == 1 && params.stride[1] == 1 && params.dilation[0] == 1 && params.dilation[1] == 1;
}

}  // namespace

bool has_depthwise_cuda(const at::Tensor& input, const at::Tensor& weight, const ConvolutionParams& params) {
  if (!is_depthwise(input, weight, params)) return false;
  const bool twos = params.stride[0] == 2 && params.stride[1] == 2 && params.dilation[0] == 1 &&
                    params.dilation[1] == 1 && weight.size(2) == weight.size(3) &&
                    (weight.size(2) == 3 || weight.size(2) == 7);
  return unit_steps(params) || twos;
}

at::Tensor depthwise_cuda(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                          const ConvolutionParams& params) {
  const OnDevice device(input);
  const at::Tensor x = dense(input), w = weight.contiguous();
  const at::Tensor b = bias ? bias->to(x.scalar_type()).contiguous() : at::Tensor();
  std::vector<int64_t> sizes = x.sizes().vec();
  for (size_t index = 0; index < 2; ++index) {
    sizes[index + 2] = convolution_extent(params, weight, index, x.size(static_cast<int64_t>(index) + 2));
  }
  const at::Tensor y = at::empty(sizes, x.options(), x.suggest_memory_format());
  AT_DISPATCH_V2(x.scalar_type(), "depthwise", AT_WRAP([&] {
                   kernels::launch_depthwise(planes<scalar_t>(x), w.const_data_ptr<scalar_t>(),
                                             b.defined() ? b.const_data_ptr<scalar_t>() : nullptr,
                                             y.mutable_data_ptr<scalar_t>(), params_of(x, sizes, weight, params),
                                             kernels::Part::kAll, device.stream());
                 }),
                 TORCHTP_CUDA_TYPES);
  return y;
}

bool has_depthwise_backward_cuda(const at::Tensor& input, const at::Tensor& weight, const ConvolutionParams& params) {
  return is_depthwise(input, weight, params) && unit_steps(params);
}

std::tuple<at::Tensor, at::Tensor> depthwise_backward_cuda(const at::Tensor& grad_output, const at::Tensor& input,
                                                           const at::Tensor& weight, const ConvolutionParams& params,
                                                           const std::array<bool, 3>& output_mask) {
  const OnDevice device(input);
  const at::Tensor x = dense(input), dy = grad_output.contiguous(x.suggest_memory_format()), w = weight.contiguous();
  const auto numbers = params_of(x, dy.sizes(), weight, params);
  at::Tensor grad_input, grad_weight;
  AT_DISPATCH_V2(x.scalar_type(), "depthwise_backward", AT_WRAP([&] {
                   const auto from = planes<scalar_t>(x), grads = planes<scalar_t>(dy);
                   if (output_mask[0]) {
                     grad_input = at::empty(x.sizes(), x.options(), x.suggest_memory_format());
                     kernels::launch_depthwise_input_grad(grads, w.const_data_ptr<scalar_t>(),
                                                          grad_input.mutable_data_ptr<scalar_t>(), numbers,
                                                          kernels::Part::kAll, device.stream());
                   }
                   if (output_mask[1]) {
                     grad_weight = at::empty(w.sizes(), w.options());
                     const int64_t floats = kernels::depthwise_weight_grad_scratch(from, grads, numbers);
                     const at::Tensor scratch = at::empty({floats}, x.options().dtype(at::kFloat));
                     kernels::launch_depthwise_weight_grad(from, grads, grad_weight.mutable_data_ptr<scalar_t>(),
                                                           scratch.mutable_data_ptr<float>(), numbers, device.stream());
                   }
                 }),
                 TORCHTP_CUDA_TYPES);
  return {grad_input, grad_weight};
}

}  // namespace torchtp::spatial
#endif
