#include "spatial/depthwise.h"

#include <ATen/Dispatch_v2.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>

#include "kernels/depthwise.h"
#include "kernels/depthwise_weight_grad.h"
#include "kernels/narrow.h"
#include "spatial/checks.h"
#include "spatial/convolution_geometry.h"
#include "spatial/device.h"
#include "spatial/op.h"
#include "spatial/slab.h"
#include "spatial/surroundings.h"
#ifdef TORCHTP_CUDA
#include "kernels/depthwise_cuda.h"
#include "kernels/depthwise_weight_grad_cuda.h"
#endif

#define TORCHTP_DEPTHWISE_TYPES at::kFloat, at::kHalf, at::kBFloat16

namespace torchtp::spatial {
namespace {

using kernels::DepthwiseParams;
using kernels::HaloPlanes;
using kernels::narrow;
using kernels::Part;

template <typename T>
void run_forward(const HaloPlanes<T>& planes, const T* weight, const T* bias, const at::Tensor& out,
                 const DepthwiseParams& params, Part part) {
#ifdef TORCHTP_CUDA
  if (is_on_device(out)) {
    const OnDevice device(out);
    kernels::launch_depthwise(planes, weight, bias, out.mutable_data_ptr<T>(), params, part, device.stream());
    return;
  }
#endif
  kernels::depthwise_cpu(planes, weight, bias, out.mutable_data_ptr<T>(), params, part);
}

template <typename T>
void run_input_grad(const HaloPlanes<T>& dy, const T* weight, const at::Tensor& dx, const DepthwiseParams& params,
                    Part part) {
#ifdef TORCHTP_CUDA
  if (is_on_device(dx)) {
    const OnDevice device(dx);
    kernels::launch_depthwise_input_grad(dy, weight, dx.mutable_data_ptr<T>(), params, part, device.stream());
    return;
  }
#endif
  kernels::depthwise_input_grad_cpu(dy, weight, dx.mutable_data_ptr<T>(), params, part);
}

template <typename T>
void run_weight_grad(const HaloPlanes<T>& x, const HaloPlanes<T>& dy, const at::Tensor& dw,
                     const DepthwiseParams& params) {
  const int64_t floats = kernels::depthwise_weight_grad_scratch(x, dy, params, most_shared_bytes(dw));
  const at::Tensor scratch = at::empty({floats}, dw.options().dtype(at::kFloat));
  float* const memory = scratch.mutable_data_ptr<float>();
#ifdef TORCHTP_CUDA
  if (is_on_device(dw)) {
    const OnDevice device(dw);
    kernels::launch_depthwise_weight_grad(x, dy, dw.mutable_data_ptr<T>(), memory, params, device.stream());
    return;
  }
#endif
  kernels::depthwise_weight_grad_cpu(x, dy, dw.mutable_data_ptr<T>(), memory, params);
}

// Whether there are kernels for the window.
bool has_programs(const at::Tensor& weight, const ConvolutionParams& params) {
  const auto most = [](at::IntArrayRef numbers) { return *std::max_element(numbers.begin(), numbers.end()); };
  return most(weight.sizes().slice(2)) <= kernels::kMostDepthwiseKernel &&
         most(params.stride) <= kernels::kMostDepthwiseStride &&
         most(params.dilation) <= kernels::kMostDepthwiseDilation;
}

}  // namespace

DepthwiseParams depthwise_params(const at::Tensor& input, at::IntArrayRef out_sizes, const at::Tensor& weight,
                                 const ConvolutionParams& params, const std::vector<Cut>& cuts) {
  const auto axis = [&](size_t index) {
    const Window window = window_of(params, weight, index);
    int64_t offset = window.padding;
    for (const Cut& cut : cuts) {
      if (cut.dim != static_cast<int64_t>(index) + 2) continue;
      const Interval out = owned(output_extent(window, cut.extent), cut.group.size, cut.group.rank);
      offset += cut.own().begin - window.stride * out.begin;
    }
    return kernels::DepthwiseAxis{narrow(window.kernel), narrow(window.stride), narrow(window.dilation),
                                  narrow(offset)};
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

bool has_filter_each(const at::Tensor& input, const at::Tensor& weight, const ConvolutionParams& params) {
  return input.dim() == 4 && weight.scalar_type() == input.scalar_type() && !params.transposed &&
         params.groups == input.size(1) && weight.size(0) == input.size(1) && weight.size(1) == 1;
}

bool has_depthwise(const at::Tensor& input, const at::Tensor& weight, const ConvolutionParams& params) {
  return has_cuda_kernels(input) && has_filter_each(input, weight, params) && has_programs(weight, params);
}

DepthwiseOutput depthwise_output(const at::Tensor& input, const at::Tensor& weight, const ConvolutionParams& params,
                                 const std::vector<Cut>& cuts) {
  DepthwiseOutput output;
  output.sizes = input.sizes().vec();
  for (size_t index = 0; index < 2; ++index) {
    output.sizes[index + 2] = convolution_extent(params, weight, index, input.size(static_cast<int64_t>(index) + 2));
  }
  for (const Cut& cut : cuts) {
    const Window window = window_of(params, weight, cut.dim - 2);
    output.wanted.push_back(read_by_outputs(cut, window));
    output.sizes[cut.dim] = owned(output_extent(window, cut.extent), cut.group.size, cut.group.rank).size();
  }
  output.params = depthwise_params(input, output.sizes, weight, params, cuts);
  return output;
}

at::Tensor depthwise(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                     const ConvolutionParams& params, const std::vector<Cut>& cuts) {
  const at::Tensor x = dense(input), w = weight.contiguous();
  const at::Tensor b = bias ? bias->to(x.scalar_type()).contiguous() : at::Tensor();
  const DepthwiseOutput output = depthwise_output(x, weight, params, cuts);
  Surroundings surroundings(x, x.suggest_memory_format(), cuts, output.wanted);
  const at::Tensor y = at::empty(output.sizes, x.options(), x.suggest_memory_format());
  AT_DISPATCH_V2(x.scalar_type(), "depthwise", AT_WRAP([&] {
                   inside_then_border<scalar_t>(surroundings, [&](Part part, const HaloPlanes<scalar_t>& planes) {
                     run_forward(planes, w.const_data_ptr<scalar_t>(),
                                 b.defined() ? b.const_data_ptr<scalar_t>() : nullptr, y, output.params, part);
                   });
                 }),
                 TORCHTP_DEPTHWISE_TYPES);
  surroundings.release();
  return y;
}

std::tuple<at::Tensor, at::Tensor> depthwise_backward(const at::Tensor& grad_output, const at::Tensor& input,
                                                      const at::Tensor& weight, const ConvolutionParams& params,
                                                      const std::array<bool, 3>& output_mask,
                                                      const std::vector<Cut>& cuts) {
  const at::Tensor x = dense(input), dy = grad_output.contiguous(x.suggest_memory_format()), w = weight.contiguous();
  std::vector<Cut> output_cuts = cuts;
  Surroundings::Wanted wanted;
  for (Cut& cut : output_cuts) {
    const Window window = window_of(params, weight, cut.dim - 2);
    const int64_t extent = output_extent(window, cut.extent);
    wanted.push_back(readers_of_inputs(cut, window, extent));
    cut.extent = extent;
  }
  const auto numbers = depthwise_params(x, dy.sizes(), weight, params, cuts);
  Surroundings surroundings(dy, x.suggest_memory_format(), output_cuts, wanted);
  at::Tensor dx, dw;
  if (output_mask[0]) dx = at::empty(x.sizes(), x.options(), x.suggest_memory_format());
  if (output_mask[1]) dw = at::empty(w.sizes(), w.options());
  AT_DISPATCH_V2(x.scalar_type(), "depthwise_backward", AT_WRAP([&] {
                   inside_then_border<scalar_t>(surroundings, [&](Part part, const HaloPlanes<scalar_t>& planes) {
                     if (dx.defined()) run_input_grad(planes, w.const_data_ptr<scalar_t>(), dx, numbers, part);
                   });
                   if (!dw.defined()) return;
                   HaloPlanes<scalar_t> own{{numbers.channels, numbers.in_height, numbers.in_width},
                                            x.const_data_ptr<scalar_t>()};
                   run_weight_grad(own, surroundings.planes<scalar_t>(), dw, numbers);
                 }),
                 TORCHTP_DEPTHWISE_TYPES);
  surroundings.release();
  return {dx, dw};
}

namespace {

ConvolutionParams depthwise_numbers(const char* op, const at::Tensor& input, const at::Tensor& weight,
                                    at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation) {
  TORCH_CHECK_VALUE(input.dim() == 4, op, ": input is [N, C, H, W], got ", input.dim(), " dims");
  TORCH_CHECK_VALUE(weight.dim() == 4 && weight.size(0) == input.size(1) && weight.size(1) == 1, op,
                    ": weight is one filter a channel, [", input.size(1), ", 1, kernel, kernel], got ", weight.sizes());
  ConvolutionParams params{stride.vec(), padding.vec(), dilation.vec(), {0, 0}, false, input.size(1)};
  check_list(op, "stride", stride, 2);
  check_list(op, "dilation", dilation, 2);
  TORCH_CHECK_VALUE(has_programs(weight, params), "depthwise: kernels go up to ", kernels::kMostDepthwiseKernel,
                    ", strides up to ", kernels::kMostDepthwiseStride, " and dilations up to ",
                    kernels::kMostDepthwiseDilation, " in each dim, but these are ", weight.sizes().slice(2), ", ",
                    stride, " and ", dilation, "; torchtp::convolution takes all");
  return params;
}

at::Tensor depthwise_op(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                        at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                        at::IntArrayRef cut_dims, at::IntArrayRef cut_extents, const Groups& cut_groups) {
  const auto params = depthwise_numbers("depthwise", input, weight, stride, padding, dilation);
  const auto cuts = make_cuts(cut_dims, cut_extents, cut_groups, 4);
  check_convolution("depthwise", input, weight, bias, params, cuts);
  return depthwise(input, weight, bias, params, cuts);
}

std::tuple<at::Tensor, at::Tensor> depthwise_backward_op(const at::Tensor& grad_output, const at::Tensor& input,
                                                         const at::Tensor& weight, at::IntArrayRef stride,
                                                         at::IntArrayRef padding, at::IntArrayRef dilation,
                                                         at::IntArrayRef cut_dims, at::IntArrayRef cut_extents,
                                                         const Groups& cut_groups) {
  const auto params = depthwise_numbers("depthwise_backward", input, weight, stride, padding, dilation);
  const auto cuts = make_cuts(cut_dims, cut_extents, cut_groups, 4);
  check_convolution_backward("depthwise_backward", grad_output, input, weight, params, cuts);
  return depthwise_backward(grad_output, input, weight, params, {true, true, false}, cuts);
}

void register_kernels(torch::Library& m) {
  m.impl("depthwise", depthwise_op);
  m.impl("depthwise_backward", depthwise_backward_op);
}

}  // namespace

TORCH_LIBRARY_IMPL(torchtp, CPU, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(torchtp, CUDA, m) { register_kernels(m); }

}  // namespace torchtp::spatial
