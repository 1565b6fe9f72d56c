// torchtp::convolution and its backward as dispatcher ops: kernels, shapes for fake tensors, autograd to any order.
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "spatial/convolution.h"

namespace torchtp::spatial {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;
using Groups = c10::List<std::string>;

ConvolutionParams make_params(at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                              bool transposed, at::IntArrayRef output_padding, int64_t groups) {
  return {stride.vec(), padding.vec(), dilation.vec(), output_padding.vec(), transposed, groups};
}

at::Tensor convolution_kernel(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                              at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                              bool transposed, at::IntArrayRef output_padding, int64_t groups, at::IntArrayRef cut_dims,
                              at::IntArrayRef cut_extents, const Groups& cut_groups) {
  return convolution(input, weight, bias, make_params(stride, padding, dilation, transposed, output_padding, groups),
                     make_cuts(cut_dims, cut_extents, cut_groups, input.dim()));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward_kernel(
    const at::Tensor& grad_output, const at::Tensor& input, const at::Tensor& weight, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups,
    std::array<bool, 3> output_mask, at::IntArrayRef cut_dims, at::IntArrayRef cut_extents, const Groups& cut_groups) {
  return convolution_backward(grad_output, input, weight,
                              make_params(stride, padding, dilation, transposed, output_padding, groups), output_mask,
                              make_cuts(cut_dims, cut_extents, cut_groups, input.dim()));
}

at::Tensor convolution_meta(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>&,
                            at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                            at::IntArrayRef output_padding, int64_t groups, at::IntArrayRef cut_dims,
                            at::IntArrayRef cut_extents, const Groups& cut_groups) {
  const ConvolutionParams params = make_params(stride, padding, dilation, transposed, output_padding, groups);
  std::vector<int64_t> sizes{input.size(0), transposed ? weight.size(1) * groups : weight.size(0)};
  for (int64_t dim = 2; dim < input.dim(); ++dim) {
    sizes.push_back(convolution_extent(params, weight, dim - 2, input.size(dim)));
  }
  for (const Cut& cut : make_cuts(cut_dims, cut_extents, cut_groups, input.dim())) {
    const int64_t extent = convolution_extent(params, weight, cut.dim - 2, cut.extent);
    sizes[cut.dim] = owned(extent, cut.group.size, cut.group.rank).size();
  }
  return at::empty(sizes, input.options(), input.suggest_memory_format());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward_meta(
    const at::Tensor&, const at::Tensor& input, const at::Tensor& weight, at::IntArrayRef, at::IntArrayRef,
    at::IntArrayRef, bool transposed, at::IntArrayRef, int64_t groups, std::array<bool, 3> output_mask, at::IntArrayRef,
    at::IntArrayRef, const Groups&) {
  at::Tensor grad_input, grad_weight, grad_bias;
  if (output_mask[0]) grad_input = at::empty_like(input);
  if (output_mask[1]) grad_weight = at::empty_like(weight);
  if (output_mask[2]) {
    grad_bias = at::empty_symint({transposed ? weight.sym_size(1) * groups : weight.sym_size(0)}, weight.options());
  }
  return {grad_input, grad_weight, grad_bias};
}

// What all calls of one convolution share, kept between forward and backward.
struct Call {
  std::vector<int64_t> stride, padding, dilation;
  bool transposed;
  std::vector<int64_t> output_padding;
  int64_t groups;
  std::vector<int64_t> cut_dims, cut_extents;
  Groups cut_groups;

  at::Tensor forward(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias) const {
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("torchtp::convolution", "")
                               .typed<decltype(convolution_kernel)>();
    return op.call(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups, cut_dims,
                   cut_extents, cut_groups);
  }

  std::tuple<at::Tensor, at::Tensor, at::Tensor> backward(const at::Tensor& grad_output, const at::Tensor& input,
                                                          const at::Tensor& weight, std::array<bool, 3> mask) const {
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("torchtp::convolution_backward", "")
                               .typed<decltype(convolution_backward_kernel)>();
    return op.call(grad_output, input, weight, stride, padding, dilation, transposed, output_padding, groups, mask,
                   cut_dims, cut_extents, cut_groups);
  }

  void save(AutogradContext* ctx) const {
    ctx->saved_data["stride"] = stride;
    ctx->saved_data["padding"] = padding;
    ctx->saved_data["dilation"] = dilation;
    ctx->saved_data["transposed"] = transposed;
    ctx->saved_data["output_padding"] = output_padding;
    ctx->saved_data["groups"] = groups;
    ctx->saved_data["cut_dims"] = cut_dims;
    ctx->saved_data["cut_extents"] = cut_extents;
    ctx->saved_data["cut_groups"] = cut_groups;
  }

  static Call load(AutogradContext* ctx) {
    auto& data = ctx->saved_data;
    return {data["stride"].toIntVector(),
            data["padding"].toIntVector(),
            data["dilation"].toIntVector(),
            data["transposed"].toBool(),
            data["output_padding"].toIntVector(),
            data["groups"].toInt(),
            data["cut_dims"].toIntVector(),
            data["cut_extents"].toIntVector(),
            c10::impl::toTypedList<std::string>(data["cut_groups"].toList())};
  }
};

at::Tensor sum_defined(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined()) return b;
  return b.defined() ? a.add(b) : a;
}

// An autograd Function can't return undefined tensors: what the mask leaves out is not among the outputs.
class ConvolutionBackwardFunction : public torch::autograd::Function<ConvolutionBackwardFunction> {
 public:
  static variable_list forward(AutogradContext* ctx, const Variable& grad_output, const Variable& input,
                               const Variable& weight, const Call& call, std::array<bool, 3> mask) {
    call.save(ctx);
    ctx->save_for_backward({grad_output, input, weight});
    ctx->set_materialize_grads(false);
    at::AutoDispatchBelowADInplaceOrView below;
    auto [grad_input, grad_weight, grad_bias] = call.backward(grad_output, input, weight, mask);
    variable_list outputs;
    std::vector<int64_t> places(3, -1);
    const std::array<at::Tensor, 3> all{grad_input, grad_weight, grad_bias};
    for (size_t i = 0; i < all.size(); ++i) {
      if (!mask[i]) continue;
      places[i] = static_cast<int64_t>(outputs.size());
      outputs.push_back(all[i]);
    }
    ctx->saved_data["places"] = places;
    return outputs;
  }

  // (dx, dw, db) are bilinear in (dy, x, w): the cotangent of dx acts as an input, that of dw as a weight, of db as a
  // bias.
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Call call = Call::load(ctx);
    const variable_list saved = ctx->get_saved_variables();
    const Variable &grad_output = saved[0], &input = saved[1], &weight = saved[2];
    const std::vector<int64_t> places = ctx->saved_data["places"].toIntVector();
    const auto cotangent = [&](size_t i) { return places[i] < 0 ? at::Tensor() : grads[places[i]]; };
    const at::Tensor as_input = cotangent(0), as_weight = cotangent(1), as_bias = cotangent(2);
    at::Tensor for_grad_output, for_input, for_weight;
    if (ctx->needs_input_grad(0)) {
      if (as_input.defined()) for_grad_output = call.forward(as_input, weight, {});
      if (as_weight.defined()) for_grad_output = sum_defined(for_grad_output, call.forward(input, as_weight, {}));
      if (as_bias.defined()) {
        std::vector<int64_t> shape(grad_output.dim(), 1);
        shape[1] = as_bias.size(0);
        for_grad_output = sum_defined(for_grad_output, as_bias.view(shape).expand_as(grad_output));
      }
    }
    if (ctx->needs_input_grad(1) && as_weight.defined()) {
      for_input = std::get<0>(call.backward(grad_output, input, as_weight, {true, false, false}));
    }
    if (ctx->needs_input_grad(2) && as_input.defined()) {
      for_weight = std::get<1>(call.backward(grad_output, as_input, weight, {false, true, false}));
    }
    return {for_grad_output, for_input, for_weight, {}, {}};
  }
};

class ConvolutionFunction : public torch::autograd::Function<ConvolutionFunction> {
 public:
  static Variable forward(AutogradContext* ctx, const Variable& input, const Variable& weight,
                          const std::optional<at::Tensor>& bias, const Call& call) {
    call.save(ctx);
    ctx->save_for_backward({input, weight});
    ctx->saved_data["has_bias"] = bias.has_value() && bias->defined();
    at::AutoDispatchBelowADInplaceOrView below;
    return call.forward(input, weight, bias);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const bool has_bias = ctx->saved_data["has_bias"].toBool();
    const std::array<bool, 3> mask{ctx->needs_input_grad(0), ctx->needs_input_grad(1),
                                   has_bias && ctx->needs_input_grad(2)};
    auto [grad_input, grad_weight, grad_bias] = Call::load(ctx).backward(grads[0], saved[0], saved[1], mask);
    return {grad_input, grad_weight, grad_bias, {}};
  }
};

at::Tensor convolution_autograd(const at::Tensor& input, const at::Tensor& weight,
                                const std::optional<at::Tensor>& bias, at::IntArrayRef stride, at::IntArrayRef padding,
                                at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding,
                                int64_t groups, at::IntArrayRef cut_dims, at::IntArrayRef cut_extents,
                                const Groups& cut_groups) {
  return ConvolutionFunction::apply(input, weight, bias,
                                    Call{stride.vec(), padding.vec(), dilation.vec(), transposed, output_padding.vec(),
                                         groups, cut_dims.vec(), cut_extents.vec(), cut_groups});
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward_autograd(
    const at::Tensor& grad_output, const at::Tensor& input, const at::Tensor& weight, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups,
    std::array<bool, 3> output_mask, at::IntArrayRef cut_dims, at::IntArrayRef cut_extents, const Groups& cut_groups) {
  auto out = ConvolutionBackwardFunction::apply(
      grad_output, input, weight,
      Call{stride.vec(), padding.vec(), dilation.vec(), transposed, output_padding.vec(), groups, cut_dims.vec(),
           cut_extents.vec(), cut_groups},
      output_mask);
  std::array<at::Tensor, 3> all;
  size_t next = 0;
  for (size_t i = 0; i < all.size(); ++i) {
    if (output_mask[i]) all[i] = out[next++];
  }
  return {all[0], all[1], all[2]};
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

}  // namespace torchtp::spatial
