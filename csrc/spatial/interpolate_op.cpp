// torchtp::interpolate and its backward as dispatcher ops. Linear: the backward of the backward is the forward.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "spatial/interpolate.h"
#include "spatial/linear_op.h"

namespace torchtp::spatial::interpolate_op {
namespace {

at::Tensor interpolate_kernel(const at::Tensor& input, const std::string& mode, at::IntArrayRef output_size,
                              at::ArrayRef<double> scales, bool align_corners, at::IntArrayRef cut_dims,
                              at::IntArrayRef cut_extents, const Groups& cut_groups) {
  return interpolate(input, {mode, output_size.vec(), scales.vec(), align_corners},
                     make_cuts(cut_dims, cut_extents, cut_groups, input.dim()));
}

at::Tensor interpolate_backward_kernel(const at::Tensor& grad_output, at::IntArrayRef input_sizes,
                                       const std::string& mode, at::IntArrayRef output_size,
                                       at::ArrayRef<double> scales, bool align_corners, at::IntArrayRef cut_dims,
                                       at::IntArrayRef cut_extents, const Groups& cut_groups) {
  return interpolate_backward(grad_output, input_sizes, {mode, output_size.vec(), scales.vec(), align_corners},
                              make_cuts(cut_dims, cut_extents, cut_groups, grad_output.dim()));
}

at::Tensor interpolate_meta(const at::Tensor& input, const std::string& mode, at::IntArrayRef output_size,
                            at::ArrayRef<double> scales, bool align_corners, at::IntArrayRef cut_dims,
                            at::IntArrayRef cut_extents, const Groups& cut_groups) {
  const auto cuts = make_cuts(cut_dims, cut_extents, cut_groups, input.dim());
  const InterpolateParams params{mode, output_size.vec(), scales.vec(), align_corners};
  if (planned(cuts)) return interpolate(input, params, cuts);
  return at::empty(interpolate_sizes(input.sizes(), params, cuts), input.options(), input.suggest_memory_format());
}

at::Tensor interpolate_backward_meta(const at::Tensor& grad_output, at::IntArrayRef input_sizes,
                                     const std::string& mode, at::IntArrayRef output_size, at::ArrayRef<double> scales,
                                     bool align_corners, at::IntArrayRef cut_dims, at::IntArrayRef cut_extents,
                                     const Groups& cut_groups) {
  const auto cuts = make_cuts(cut_dims, cut_extents, cut_groups, grad_output.dim());
  const InterpolateParams params{mode, output_size.vec(), scales.vec(), align_corners};
  if (planned(cuts)) return interpolate_backward(grad_output, input_sizes, params, cuts);
  check_interpolate_backward(grad_output, input_sizes, params, cuts);
  return at::empty(input_sizes, grad_output.options(), grad_output.suggest_memory_format());
}

struct Interpolate {
  // mode, output_size, scales, align_corners, cut_dims, cut_extents, cut_groups.
  using Args = std::tuple<std::string, Ints, std::vector<double>, bool, Ints, Ints, Groups>;
  static const auto& forward() {
    static const auto op = typed_op("torchtp::interpolate", &interpolate_kernel);
    return op;
  }
  static const auto& backward() {
    static const auto op = typed_op("torchtp::interpolate_backward", &interpolate_backward_kernel);
    return op;
  }
};

at::Tensor interpolate_autograd(const at::Tensor& input, const std::string& mode, at::IntArrayRef output_size,
                                at::ArrayRef<double> scales, bool align_corners, at::IntArrayRef cut_dims,
                                at::IntArrayRef cut_extents, const Groups& cut_groups) {
  return linear_autograd<Interpolate>(input, mode, output_size, scales, align_corners, cut_dims, cut_extents,
                                      cut_groups);
}

at::Tensor interpolate_backward_autograd(const at::Tensor& grad_output, at::IntArrayRef input_sizes,
                                         const std::string& mode, at::IntArrayRef output_size,
                                         at::ArrayRef<double> scales, bool align_corners, at::IntArrayRef cut_dims,
                                         at::IntArrayRef cut_extents, const Groups& cut_groups) {
  return linear_backward_autograd<Interpolate>(grad_output, input_sizes, mode, output_size, scales, align_corners,
                                               cut_dims, cut_extents, cut_groups);
}

void register_kernels(torch::Library& m) {
  m.impl("interpolate", interpolate_kernel);
  m.impl("interpolate_backward", interpolate_backward_kernel);
}

}  // namespace

TORCH_LIBRARY_IMPL(torchtp, CPU, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(torchtp, CUDA, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(torchtp, Meta, m) {
  m.impl("interpolate", interpolate_meta);
  m.impl("interpolate_backward", interpolate_backward_meta);
}
TORCH_LIBRARY_IMPL(torchtp, Autograd, m) {
  m.impl("interpolate", interpolate_autograd);
  m.impl("interpolate_backward", interpolate_backward_autograd);
}

}  // namespace torchtp::spatial::interpolate_op
