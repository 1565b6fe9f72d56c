// torchtp::convolution and its backward as dispatcher ops: kernels, shapes for fake tensors, autograd to any order.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "spatial/convolution.h"
#include "spatial/op.h"
#include "spatial/slab.h"

namespace torchtp::spatial::convolution_op {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;
using Optional = std::optional<at::Tensor>;
using Three = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

// As in ATen, a list may have one number for all spatial dims.
ConvolutionParams make_params(const at::Tensor& input, at::IntArrayRef stride, at::IntArrayRef padding,
                              at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding,
                              int64_t groups) {
  const auto each = [&](at::IntArrayRef list) {
    return list.size() == 1 && input.dim() > 3 ? std::vector<int64_t>(input.dim() - 2, list[0]) : list.vec();
  };
  return {each(stride), each(padding), each(dilation), each(output_padding), transposed, groups};
}

at::Tensor convolution_kernel(const at::Tensor& input, const at::Tensor& weight, const Optional& bias,
                              at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                              bool transposed, at::IntArrayRef output_padding, int64_t groups, at::IntArrayRef cut_dims,
                              at::IntArrayRef cut_extents, const Groups& cut_groups) {
  return convolution(input, weight, bias,
                     make_params(input, stride, padding, dilation, transposed, output_padding, groups),
                     make_cuts(cut_dims, cut_extents, cut_groups, input.dim()));
}

Three convolution_backward_kernel(const at::Tensor& grad_output, const at::Tensor& input, const at::Tensor& weight,
                                  at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                                  bool transposed, at::IntArrayRef output_padding, int64_t groups,
                                  std::array<bool, 3> output_mask, at::IntArrayRef cut_dims,
                                  at::IntArrayRef cut_extents, const Groups& cut_groups) {
  return convolution_backward(grad_output, input, weight,
                              make_params(input, stride, padding, dilation, transposed, output_padding, groups),
                              output_mask, make_cuts(cut_dims, cut_extents, cut_groups, input.dim()));
}

at::Tensor convolution_meta(const at::Tensor& input, const at::Tensor& weight, const Optional& bias,
                            at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                            at::IntArrayRef output_padding, int64_t groups, at::IntArrayRef cut_dims,
                            at::IntArrayRef cut_extents, const Groups& cut_groups) {
  const ConvolutionParams params = make_params(input, stride, padding, dilation, transposed, output_padding, groups);
  const std::vector<Cut> cuts = make_cuts(cut_dims, cut_extents, cut_groups, input.dim());
  check_convolution("convolution", input, weight, bias, params, cuts);
  if (planned(cuts)) convolution(input, weight, {}, params, cuts);
  return at::empty(own_output_sizes(input, weight, params, cuts), input.options(), convolution_format(input, weight));
}

Three convolution_backward_meta(const at::Tensor& grad_output, const at::Tensor& input, const at::Tensor& weight,
                                at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                                bool transposed, at::IntArrayRef output_padding, int64_t groups,
                                std::array<bool, 3> output_mask, at::IntArrayRef cut_dims, at::IntArrayRef cut_extents,
                                const Groups& cut_groups) {
  const std::vector<Cut> cuts = make_cuts(cut_dims, cut_extents, cut_groups, input.dim());
  const ConvolutionParams params = make_params(input, stride, padding, dilation, transposed, output_padding, groups);
  check_convolution_backward("convolution_backward", grad_output, input, weight, params, cuts);
  if (planned(cuts)) {
    convolution_backward(grad_output, input, weight, params, {output_mask[0], output_mask[1], false}, cuts);
  }
  const auto [grad_input, grad_weight] = new_gradients(input, weight, output_mask);
  at::Tensor grad_bias;
  if (output_mask[2]) {
    grad_bias = at::empty_symint({transposed ? weight.sym_size(1) * groups : weight.sym_size(0)}, weight.options());
  }
  return {grad_input, grad_weight, grad_bias};
}

// stride, padding, dilation, transposed, output_padding, groups, cut_dims, cut_extents, cut_groups.
using Args = std::tuple<Ints, Ints, Ints, bool, Ints, int64_t, Ints, Ints, Groups>;

Args make_args(at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
               at::IntArrayRef output_padding, int64_t groups, at::IntArrayRef cut_dims, at::IntArrayRef cut_extents,
               const Groups& cut_groups) {
  return {stride.vec(), padding.vec(),  dilation.vec(),    transposed, output_padding.vec(),
          groups,       cut_dims.vec(), cut_extents.vec(), cut_groups};
}

const auto& forward_op() {
  static const auto op = typed_op("torchtp::convolution", &convolution_kernel);
  return op;
}

const auto& backward_op() {
  static const auto op = typed_op("torchtp::convolution_backward", &convolution_backward_kernel);
  return op;
}

at::Tensor call_forward(const at::Tensor& input, const at::Tensor& weight, const Optional& bias, const Args& args) {
  return call_with(forward_op(), args, input, weight, bias);
}

Three call_backward(const at::Tensor& grad_output, const at::Tensor& input, const at::Tensor& weight,
                    const std::array<bool, 3>& mask, const Args& args) {
  const auto& [stride, padding, dilation, transposed, output_padding, groups, dims, extents, cut_groups] = args;
  return backward_op().call(grad_output, input, weight, stride, padding, dilation, transposed, output_padding, groups,
                            mask, dims, extents, cut_groups);
}

at::Tensor sum_defined(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined()) return b;
  return b.defined() ? a.add(b) : a;
}

class ConvolutionFunction : public torch::autograd::Function<ConvolutionFunction> {
 public:
  static Variable forward(AutogradContext* ctx, const Variable& input, const Variable& weight, const Optional& bias,
                          const Args& args) {
    at::AutoDispatchBelowADInplaceOrView below;
    save_args(ctx, args, affine_of(weight, bias));
    ctx->save_for_backward({input, weight});
    return call_forward(input, weight, bias, args);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const auto [args, affine] = load_args<Args, Affine>(ctx);
    auto [dx, dw, db] = call_backward(grads[0], saved[0], saved[1], affine_mask(ctx, affine), args);
    return {dx, dw, db, {}};
  }
};

class ConvolutionBackwardFunction : public torch::autograd::Function<ConvolutionBackwardFunction> {
 public:
  static variable_list forward(AutogradContext* ctx, const Variable& grad_output, const Variable& input,
                               const Variable& weight, const std::array<bool, 3>& mask, const Args& args) {
    at::AutoDispatchBelowADInplaceOrView below;
    save_args(ctx, args, mask);
    ctx->save_for_backward({grad_output, input, weight});
    ctx->set_materialize_grads(false);
    return masked(call_backward(grad_output, input, weight, mask, args), mask);
  }

  // (dx, dw, db) are bilinear in (dy, x, w): the cotangent of dx acts as an input, that of dw as a weight, of db as a
  // bias.
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto [args, mask] = load_args<Args, std::array<bool, 3>>(ctx);
    const variable_list saved = ctx->get_saved_variables();
    const Variable &grad_output = saved[0], &input = saved[1], &weight = saved[2];
    const auto [as_input, as_weight, as_bias] = unmask(grads, mask);
    at::Tensor for_grad_output, for_input, for_weight;
    if (ctx->needs_input_grad(0)) {
      if (as_input.defined()) for_grad_output = call_forward(as_input, weight, {}, args);
      if (as_weight.defined()) for_grad_output = sum_defined(for_grad_output, call_forward(input, as_weight, {}, args));
      if (as_bias.defined()) {
        std::vector<int64_t> shape(grad_output.dim(), 1);
        shape[1] = as_bias.size(0);
        for_grad_output = sum_defined(for_grad_output, as_bias.view(shape).expand_as(grad_output));
      }
    }
    if (ctx->needs_input_grad(1) && as_weight.defined()) {
      for_input = std::get<0>(call_backward(grad_output, input, as_weight, {true, false, false}, args));
    }
    if (ctx->needs_input_grad(2) && as_input.defined()) {
      for_weight = std::get<1>(call_backward(grad_output, as_input, weight, {false, true, false}, args));
    }
    return {for_grad_output, for_input, for_weight, {}, {}};
  }
};

at::Tensor convolution_autograd(const at::Tensor& input, const at::Tensor& weight, const Optional& bias,
                                at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                                bool transposed, at::IntArrayRef output_padding, int64_t groups,
                                at::IntArrayRef cut_dims, at::IntArrayRef cut_extents, const Groups& cut_groups) {
  if (!needs_graph(input, weight, bias)) {
    return call_below(forward_op(), input, weight, bias, stride, padding, dilation, transposed, output_padding, groups,
                      cut_dims, cut_extents, cut_groups);
  }
  return ConvolutionFunction::apply(
      input, weight, bias,
      make_args(stride, padding, dilation, transposed, output_padding, groups, cut_dims, cut_extents, cut_groups));
}

Three convolution_backward_autograd(const at::Tensor& grad_output, const at::Tensor& input, const at::Tensor& weight,
                                    at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                                    bool transposed, at::IntArrayRef output_padding, int64_t groups,
                                    std::array<bool, 3> output_mask, at::IntArrayRef cut_dims,
                                    at::IntArrayRef cut_extents, const Groups& cut_groups) {
  if (!needs_graph(grad_output, input, weight)) {
    return call_below(backward_op(), grad_output, input, weight, stride, padding, dilation, transposed, output_padding,
                      groups, output_mask, cut_dims, cut_extents, cut_groups);
  }
  const auto [dx, dw, db] = unmask(
      ConvolutionBackwardFunction::apply(
          grad_output, input, weight, output_mask,
          make_args(stride, padding, dilation, transposed, output_padding, groups, cut_dims, cut_extents, cut_groups)),
      output_mask);
  return {dx, dw, db};
}

void register_kernels(torch::Library& m) {
  m.impl("convolution", convolution_kernel);
  m.impl("convolution_backward", convolution_backward_kernel);
}

}  // namespace

TORCH_LIBRARY_IMPL(torchtp, CPU, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(torchtp, CUDA, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(torchtp, Meta, m) {
  m.impl("convolution", convolution_meta);
  m.impl("convolution_backward", convolution_backward_meta);
}
TORCH_LIBRARY_IMPL(torchtp, Autograd, m) {
  m.impl("convolution", convolution_autograd);
  m.impl("convolution_backward", convolution_backward_autograd);
}

}  // namespace torchtp::spatial::convolution_op
