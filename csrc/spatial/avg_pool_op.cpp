// torchtp::avg_pool and its backward as dispatcher ops. Linear: the backward of the backward is the forward.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "spatial/avg_pool.h"
#include "spatial/linear_op.h"

namespace torchtp::spatial::avg_pool_op {
namespace {

PoolParams make_params(at::IntArrayRef kernel_size, at::IntArrayRef stride, at::IntArrayRef padding, bool ceil_mode) {
  return {kernel_size.vec(), stride.vec(), padding.vec(), {1}, ceil_mode};
}

at::Tensor avg_pool_kernel(const at::Tensor& input, at::IntArrayRef kernel_size, at::IntArrayRef stride,
                           at::IntArrayRef padding, bool ceil_mode, bool count_include_pad,
                           std::optional<int64_t> divisor_override, at::IntArrayRef cut_dims,
                           at::IntArrayRef cut_extents, const Groups& cut_groups) {
  return avg_pool(input, make_params(kernel_size, stride, padding, ceil_mode), {count_include_pad, divisor_override},
                  make_cuts(cut_dims, cut_extents, cut_groups, input.dim()));
}

at::Tensor avg_pool_backward_kernel(const at::Tensor& grad_output, at::IntArrayRef input_sizes,
                                    at::IntArrayRef kernel_size, at::IntArrayRef stride, at::IntArrayRef padding,
                                    bool ceil_mode, bool count_include_pad, std::optional<int64_t> divisor_override,
                                    at::IntArrayRef cut_dims, at::IntArrayRef cut_extents, const Groups& cut_groups) {
  return avg_pool_backward(grad_output, input_sizes, make_params(kernel_size, stride, padding, ceil_mode),
                           {count_include_pad, divisor_override},
                           make_cuts(cut_dims, cut_extents, cut_groups, grad_output.dim()));
}

at::Tensor avg_pool_meta(const at::Tensor& input, at::IntArrayRef kernel_size, at::IntArrayRef stride,
                         at::IntArrayRef padding, bool ceil_mode, bool count_include_pad,
                         std::optional<int64_t> divisor_override, at::IntArrayRef cut_dims, at::IntArrayRef cut_extents,
                         const Groups& cut_groups) {
  const PoolParams params = make_params(kernel_size, stride, padding, ceil_mode);
  const auto cuts = make_cuts(cut_dims, cut_extents, cut_groups, input.dim());
  if (planned(cuts)) return avg_pool(input, params, {count_include_pad, divisor_override}, cuts);
  const PoolGeometry geometry("avg_pool", input.sizes(), params, cuts);
  return at::empty(geometry.output_sizes(), input.options(), avg_pool_format(geometry, input));
}

at::Tensor avg_pool_backward_meta(const at::Tensor& grad_output, at::IntArrayRef input_sizes,
                                  at::IntArrayRef kernel_size, at::IntArrayRef stride, at::IntArrayRef padding,
                                  bool ceil_mode, bool count_include_pad, std::optional<int64_t> divisor_override,
                                  at::IntArrayRef cut_dims, at::IntArrayRef cut_extents, const Groups& cut_groups) {
  const auto cuts = make_cuts(cut_dims, cut_extents, cut_groups, grad_output.dim());
  const PoolParams params = make_params(kernel_size, stride, padding, ceil_mode);
  if (planned(cuts)) {
    return avg_pool_backward(grad_output, input_sizes, params, {count_include_pad, divisor_override}, cuts);
  }
  const PoolGeometry geometry("avg_pool_backward", input_sizes, params, cuts);
  geometry.check_backward("avg_pool_backward", input_sizes, grad_output);
  return at::empty(input_sizes, grad_output.options(), avg_pool_format(geometry, grad_output));
}

struct AvgPool {
  // kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override, cut_dims, cut_extents, cut_groups.
  using Args = std::tuple<Ints, Ints, Ints, bool, bool, std::optional<int64_t>, Ints, Ints, Groups>;
  static const auto& forward() {
    static const auto op = typed_op("torchtp::avg_pool", &avg_pool_kernel);
    return op;
  }
  static const auto& backward() {
    static const auto op = typed_op("torchtp::avg_pool_backward", &avg_pool_backward_kernel);
    return op;
  }
};

at::Tensor avg_pool_autograd(const at::Tensor& input, at::IntArrayRef kernel_size, at::IntArrayRef stride,
                             at::IntArrayRef padding, bool ceil_mode, bool count_include_pad,
                             std::optional<int64_t> divisor_override, at::IntArrayRef cut_dims,
                             at::IntArrayRef cut_extents, const Groups& cut_groups) {
  return linear_autograd<AvgPool>(input, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override,
                                  cut_dims, cut_extents, cut_groups);
}

at::Tensor avg_pool_backward_autograd(const at::Tensor& grad_output, at::IntArrayRef input_sizes,
                                      at::IntArrayRef kernel_size, at::IntArrayRef stride, at::IntArrayRef padding,
                                      bool ceil_mode, bool count_include_pad, std::optional<int64_t> divisor_override,
                                      at::IntArrayRef cut_dims, at::IntArrayRef cut_extents, const Groups& cut_groups) {
  return linear_backward_autograd<AvgPool>(grad_output, input_sizes, kernel_size, stride, padding, ceil_mode,
                                           count_include_pad, divisor_override, cut_dims, cut_extents, cut_groups);
}

void register_kernels(torch::Library& m) {
  m.impl("avg_pool", avg_pool_kernel);
  m.impl("avg_pool_backward", avg_pool_backward_kernel);
}

}  // namespace

TORCH_LIBRARY_IMPL(torchtp, CPU, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(torchtp, CUDA, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(torchtp, Meta, m) {
  m.impl("avg_pool", avg_pool_meta);
  m.impl("avg_pool_backward", avg_pool_backward_meta);
}
TORCH_LIBRARY_IMPL(torchtp, Autograd, m) {
  m.impl("avg_pool", avg_pool_autograd);
  m.impl("avg_pool_backward", avg_pool_backward_autograd);
}

}  // namespace torchtp::spatial::avg_pool_op
