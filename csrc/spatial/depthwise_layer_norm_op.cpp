// torchtp::depthwise_layer_norm as a dispatcher op: kernels, shapes for fake tensors, autograd by the backwards of the
// convolution and of the norm, so to second order.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "spatial/depthwise_layer_norm.h"
#include "spatial/op.h"

namespace torchtp::spatial::depthwise_layer_norm_op {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;
using Optional = std::optional<at::Tensor>;
using Three = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using Four = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

ConvolutionParams make_params(const at::Tensor& input, at::IntArrayRef stride, at::IntArrayRef padding,
                              at::IntArrayRef dilation) {
  return {stride.vec(), padding.vec(), dilation.vec(), {0, 0}, false, input.size(1)};
}

Four depthwise_layer_norm_kernel(const at::Tensor& input, const at::Tensor& weight, const Optional& bias,
                                 const Optional& norm_weight, const Optional& norm_bias, double eps, bool keep,
                                 at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                                 at::IntArrayRef cut_dims, at::IntArrayRef cut_extents, const Groups& cut_groups) {
  return depthwise_layer_norm(input, weight, bias, make_params(input, stride, padding, dilation),
                              {norm_weight, norm_bias, eps}, keep, make_cuts(cut_dims, cut_extents, cut_groups, 4));
}

Four depthwise_layer_norm_pieces_kernel(const at::Tensor& input, const at::Tensor& weight, const Optional& bias,
                                        const Optional& norm_weight, const Optional& norm_bias, double eps, bool keep,
                                        at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                                        at::IntArrayRef cut_dims, at::IntArrayRef cut_extents,
                                        const Groups& cut_groups) {
  return depthwise_layer_norm_pieces(input, weight, bias, make_params(input, stride, padding, dilation),
                                     {norm_weight, norm_bias, eps}, keep,
                                     make_cuts(cut_dims, cut_extents, cut_groups, 4));
}

using Forward = decltype(depthwise_layer_norm_kernel);
using Convolution = at::Tensor(const at::Tensor&, const at::Tensor&, const Optional&, at::IntArrayRef, at::IntArrayRef,
                               at::IntArrayRef, bool, at::IntArrayRef, int64_t, at::IntArrayRef, at::IntArrayRef,
                               const Groups&);
using ConvolutionBackward = Three(const at::Tensor&, const at::Tensor&, const at::Tensor&, at::IntArrayRef,
                                  at::IntArrayRef, at::IntArrayRef, bool, at::IntArrayRef, int64_t, std::array<bool, 3>,
                                  at::IntArrayRef, at::IntArrayRef, const Groups&);
using LayerNorm = Three(const at::Tensor&, const Optional&, const Optional&, double);
using LayerNormBackward = Three(const at::Tensor&, const at::Tensor&, const Optional&, const at::Tensor&,
                                const at::Tensor&, std::array<bool, 3>);

template <typename Signature>
auto op_of(const char* name) {
  return typed_op(name, static_cast<Signature*>(nullptr));
}

const auto& forward_op() {
  static const auto op = op_of<Forward>("torchtp::depthwise_layer_norm");
  return op;
}

Four depthwise_layer_norm_meta(const at::Tensor& input, const at::Tensor& weight, const Optional& bias,
                               const Optional& norm_weight, const Optional& norm_bias, double eps, bool keep,
                               at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                               at::IntArrayRef cut_dims, at::IntArrayRef cut_extents, const Groups& cut_groups) {
  static const auto convolution_op = op_of<Convolution>("torchtp::convolution");
  static const auto norm_op = op_of<LayerNorm>("torchtp::layer_norm_channels_first");
  const at::Tensor convolved = convolution_op.call(input, weight, bias, stride, padding, dilation, false, {0, 0},
                                                   input.size(1), cut_dims, cut_extents, cut_groups);
  const auto [out, mean, rstd] = norm_op.call(convolved, norm_weight, norm_bias, eps);
  return {out, keep ? convolved : at::empty({0}, input.options()), mean, rstd};
}

// stride, padding, dilation, cut_dims, cut_extents, cut_groups.
using Args = std::tuple<Ints, Ints, Ints, Ints, Ints, Groups>;

class DepthwiseLayerNormFunction : public torch::autograd::Function<DepthwiseLayerNormFunction> {
 public:
  static variable_list forward(AutogradContext* ctx, const Variable& input, const Variable& weight,
                               const Optional& bias, const Optional& norm_weight, const Optional& norm_bias, double eps,
                               const Args& args) {
    at::AutoDispatchBelowADInplaceOrView below;
    auto [out, convolved, mean, rstd] =
        call_with(forward_op(), args, input, weight, bias, norm_weight, norm_bias, eps, true);
    ctx->save_for_backward({input, weight, or_undefined(norm_weight), convolved, mean, rstd});
    save_args(ctx, args, affine_of(bias, {}), affine_of(norm_weight, norm_bias));
    ctx->mark_non_differentiable({mean, rstd});
    ctx->set_materialize_grads(false);
    return {out, convolved, mean, rstd};
  }

  // The convolution's output is a result too: so its gradient comes here, in the second derivative.
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto norm_op = op_of<LayerNormBackward>("torchtp::layer_norm_channels_first_backward");
    static const auto convolution_op = op_of<ConvolutionBackward>("torchtp::convolution_backward");
    const variable_list saved = ctx->get_saved_variables();
    const auto [args, convolution, norm] = load_args<Args, Affine, Affine>(ctx);
    // Autograd counts only the tensors that are there.
    size_t next = 0;
    const auto wanted = [&](bool there) { return there && ctx->needs_input_grad(next++); };
    const bool x = wanted(true), w = wanted(true), b = wanted(std::get<0>(convolution));
    const bool norm_w = wanted(std::get<0>(norm)), norm_b = wanted(std::get<1>(norm));
    at::Tensor dx, dw, db, grad, norm_dw, norm_db;
    if (grads[0].defined()) {
      std::tie(grad, norm_dw, norm_db) =
          norm_op.call(grads[0], saved[3], or_nothing(saved[2]), saved[4], saved[5], {x || w || b, norm_w, norm_b});
    }
    if (grads[1].defined()) grad = grad.defined() ? grad.add(grads[1]) : grads[1];
    if ((x || w || b) && grad.defined()) {
      const auto& [stride, padding, dilation, dims, extents, groups] = args;
      std::tie(dx, dw, db) = convolution_op.call(grad, saved[0], saved[1], stride, padding, dilation, false, {0, 0},
                                                 saved[0].size(1), {x, w, b}, dims, extents, groups);
    }
    return {dx, dw, db, norm_dw, norm_db, {}, {}};
  }
};

Four depthwise_layer_norm_autograd(const at::Tensor& input, const at::Tensor& weight, const Optional& bias,
                                   const Optional& norm_weight, const Optional& norm_bias, double eps, bool keep,
                                   at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                                   at::IntArrayRef cut_dims, at::IntArrayRef cut_extents, const Groups& cut_groups) {
  if (!needs_graph(input, weight, bias, norm_weight, norm_bias)) {
    return call_below(forward_op(), input, weight, bias, norm_weight, norm_bias, eps, keep, stride, padding, dilation,
                      cut_dims, cut_extents, cut_groups);
  }
  const auto out = DepthwiseLayerNormFunction::apply(
      input, weight, bias, norm_weight, norm_bias, eps,
      Args{stride.vec(), padding.vec(), dilation.vec(), cut_dims.vec(), cut_extents.vec(), cut_groups});
  return {out[0], out[1], out[2], out[3]};
}

void register_kernels(torch::Library& m) {
  m.impl("depthwise_layer_norm", depthwise_layer_norm_kernel);
  m.impl("depthwise_layer_norm_pieces", depthwise_layer_norm_pieces_kernel);
}

}  // namespace

TORCH_LIBRARY_IMPL(torchtp, CPU, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(torchtp, CUDA, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(torchtp, Meta, m) { m.impl("depthwise_layer_norm", depthwise_layer_norm_meta); }
TORCH_LIBRARY_IMPL(torchtp, Autograd, m) { m.impl("depthwise_layer_norm", depthwise_layer_norm_autograd); }

}  // namespace torchtp::spatial::depthwise_layer_norm_op
