#include "spatial/layer_norm_cuda.h"

#ifdef TORCHTP_CUDA
#include <ATen/Dispatch_v2.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>

#include "kernels/layer_norm_cuda.h"
#include "spatial/factors.h"
#include "spatial/layer_norm_channels_first.h"

namespace torchtp::spatial {
namespace {

using Optional = std::optional<at::Tensor>;

// What the kernels read without converting it first: parameters in the type of x.
bool narrow(const at::Tensor& x, const Optional& weight) { return weight && weight->scalar_type() == x.scalar_type(); }

// In one type for weight and bias; what is not there is `otherwise`.
at::Tensor readable(const at::Tensor& x, const Optional& numbers, bool narrow, double otherwise) {
  const auto options = x.options().dtype(narrow ? x.scalar_type() : at::kFloat);
  return numbers ? factors(numbers, options.dtype().toScalarType()) : at::full({x.size(1)}, otherwise, options);
}
template <typename T>
kernels::Factors<T> as_factors(const at::Tensor& numbers, bool narrow) {
  if (narrow) return {numbers.const_data_ptr<T>(), nullptr};
  return {nullptr, numbers.const_data_ptr<float>()};
}

bool channels_last(const at::Tensor& x) { return x.suggest_memory_format() != at::MemoryFormat::Contiguous; }

}  // namespace

bool has_layer_norm_cuda(const at::Tensor& x) {
  return has_cuda_kernels(x) && x.size(1) > 0 &&
         kernels::layer_norm_fits_cuda(layer_norm_params(x), channels_last(x), x.device().index());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_cuda(const at::Tensor& x, const Optional& weight,
                                                               const Optional& bias, double eps) {
  const OnDevice device(x);
  std::vector<int64_t> positions = x.sizes().vec();
  positions.erase(positions.begin() + 1);
  const at::Tensor y = at::empty(x.sizes(), x.options(), x.suggest_memory_format());
  const at::Tensor mean = at::empty(positions, x.options().dtype(at::kFloat)), rstd = at::empty_like(mean);
  const bool are_narrow = narrow(x, weight);
  const at::Tensor w = readable(x, weight, are_narrow, 1), b = readable(x, bias, are_narrow, 0);
  AT_DISPATCH_V2(x.scalar_type(), "layer_norm_channels_first", AT_WRAP([&] {
                   kernels::launch_layer_norm(x.const_data_ptr<scalar_t>(), as_factors<scalar_t>(w, are_narrow),
                                              as_factors<scalar_t>(b, are_narrow), eps, y.mutable_data_ptr<scalar_t>(),
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
  const bool are_narrow = narrow(x, weight);
  const at::Tensor w = readable(x, weight, are_narrow, 1), m = mean.contiguous(), r = rstd.contiguous();
  const at::Tensor gradients = at::empty({2, x.size(1)}, are_narrow ? x.options() : options);
  const at::Tensor scratch = at::empty({kernels::layer_norm_scratch(params)}, options);
  AT_DISPATCH_V2(x.scalar_type(), "layer_norm_channels_first_backward", AT_WRAP([&] {
                   const auto launch = [&](auto* to) {
                     kernels::launch_layer_norm_backward(
                         dy.const_data_ptr<scalar_t>(), x.const_data_ptr<scalar_t>(),
                         as_factors<scalar_t>(w, are_narrow), m.const_data_ptr<float>(), r.const_data_ptr<float>(),
                         output_mask[0] ? grad_input.mutable_data_ptr<scalar_t>() : nullptr, to,
                         scratch.mutable_data_ptr<float>(), params, channels_last(x), device.stream());
                   };
                   are_narrow ? launch(gradients.mutable_data_ptr<scalar_t>())
                              : launch(gradients.mutable_data_ptr<float>());
                 }),
                 TORCHTP_CUDA_TYPES);
  return {grad_input, output_mask[1] ? gradients.select(0, 0) : at::Tensor(),
          output_mask[2] ? gradients.select(0, 1) : at::Tensor()};
}

}  // namespace torchtp::spatial
#endif
