#include "spatial/layer_norm_cuda.h"

#ifdef TORCHTP_CUDA
#include <ATen/Dispatch_v2.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "kernels/layer_norm_cuda.h"
#include "spatial/factors.h"
#include "spatial/layer_norm_channels_first.h"

namespace torchtp::spatial {
namespace {

using Optional = std::optional<at::Tensor>;

bool channels_last(const at::Tensor& x) { return x.suggest_memory_format() != at::MemoryFormat::Contiguous; }

}  // namespace

bool has_layer_norm_cuda(const at::Tensor& x) {
  return has_cuda_kernels(x) && x.size(1) > 0 &&
         kernels::layer_norm_fits_cuda(layer_norm_params(x), channels_last(x), x.element_size(), x.device().index());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_cuda(const at::Tensor& x, const Optional& weight,
                                                               const Optional& bias, double eps) {
  const OnDevice device(x);
  std::vector<int64_t> positions = x.sizes().vec();
  positions.erase(positions.begin() + 1);
  const at::Tensor y = at::empty(x.sizes(), x.options(), x.suggest_memory_format());
  const at::Tensor mean = at::empty(positions, x.options().dtype(at::kFloat)), rstd = at::empty_like(mean);
  const at::Tensor w = factors(weight, at::kFloat), b = factors(bias, at::kFloat);
  AT_DISPATCH_V2(x.scalar_type(), "layer_norm_channels_first", AT_WRAP([&] {
                   kernels::launch_layer_norm(x.const_data_ptr<scalar_t>(), data_or_null<float>(w),
                                              data_or_null<float>(b), eps, y.mutable_data_ptr<scalar_t>(),
                                              mean.mutable_data_ptr<float>(), rstd.mutable_data_ptr<float>(),
                                              layer_norm_params(x), channels_last(x), device.stream());
                 }),
                 TORCHTP_CUDA_TYPES);
  return {y, mean, rstd};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_backward_cuda(const at::Tensor& dy, const at::Tensor& x,
                                                                        const Optional& weight, const at::Tensor& mean,
                                                                        const at::Tensor& rstd,
                                                                        const std::array<bool, 3>& output_mask) {
  const OnDevice device(x);
  const auto params = layer_norm_params(x);
  const auto options = x.options().dtype(at::kFloat);
  at::Tensor grad_input;
  if (output_mask[0]) grad_input = at::empty(x.sizes(), x.options(), x.suggest_memory_format());
  const at::Tensor w = factors(weight, at::kFloat), m = mean.contiguous(), r = rstd.contiguous();
  const at::Tensor gradients = at::empty({2, x.size(1)}, options);
  const at::Tensor scratch = at::empty({kernels::layer_norm_scratch(params)}, options);
  AT_DISPATCH_V2(x.scalar_type(), "layer_norm_channels_first_backward", AT_WRAP([&] {
                   kernels::launch_layer_norm_backward(
                       dy.const_data_ptr<scalar_t>(), x.const_data_ptr<scalar_t>(), data_or_null<float>(w),
                       m.const_data_ptr<float>(), r.const_data_ptr<float>(),
                       output_mask[0] ? grad_input.mutable_data_ptr<scalar_t>() : nullptr,
                       gradients.mutable_data_ptr<float>(), scratch.mutable_data_ptr<float>(), params, channels_last(x),
                       device.stream());
                 }),
                 TORCHTP_CUDA_TYPES);
  return {grad_input, output_mask[1] ? gradients.select(0, 0) : at::Tensor(),
          output_mask[2] ? gradients.select(0, 1) : at::Tensor()};
}

}  // namespace torchtp::spatial
#endif
