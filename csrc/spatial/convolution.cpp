#include "spatial/convolution.h"

#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "spatial/border_convolution.h"
#include "spatial/convolution_geometry.h"
#include "spatial/depthwise.h"
#include "spatial/depthwise_steps.h"
#include "spatial/onednn.h"
#include "spatial/pull.h"
#include "spatial/slab.h"

namespace torchtp::spatial {
namespace {

// NOTE [one local backward]
// The gradient of the weight is a sum of products x[i] dy[o]. Each is counted by the rank that owns x[i], so x is kept
// without halo and only dy is pulled: over the windows that read an own row. One local convolution_backward on (own x,
// pulled dy) then gives dx of the own rows, complete, and this rank's share of dw. ATen pads x alike on both sides, so
// dy is framed with zero rows until the local geometry fits: a zero row of dy adds nothing to dx and dw.

// What a rank with no output row returns; keeps the dtype and layout the others have.
at::Tensor no_rows(const at::Tensor& input, const at::Tensor& weight, const ConvolutionParams& params,
                   const std::vector<Cut>& cuts) {
  return at::empty(own_output_sizes(input, weight, params, cuts), input.options(), convolution_format(input, weight))
      .zero_();
}

bool is_empty(const Cut& cut, const std::vector<Interval>& all) { return all[cut.group.rank].empty(); }

at::Tensor forward_conv(at::Tensor input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                        ConvolutionParams params, const std::vector<Cut>& cuts) {
  if (has_depthwise(input, weight, params)) return depthwise(input, weight, bias, params, cuts);
  if (pays_border_way(input, cuts) && has_border_way(input, weight, params, cuts)) {
    return border_convolution(input, weight, bias, params, cuts);
  }
  const ConvolutionParams global = params;
  const at::Tensor own = input;
  bool nothing = input.is_meta();
  for (const Cut& cut : cuts) {
    const size_t index = cut.dim - 2;
    const Window window = window_of(global, weight, index);
    const auto wanted = read_by_outputs(cut, window);
    input = pull(input, cut, wanted, wanted[cut.group.rank]);
    params.padding[index] = 0;
    if (wanted[cut.group.rank].size() == window.reach() + 1)
      params.stride[index] = 1;  // NOTE [one output has no stride]
    nothing |= is_empty(cut, wanted);
  }
  if (nothing) return no_rows(own, weight, global, cuts);
  return at::convolution(input, weight, bias, params.stride, params.padding, params.dilation, false,
                         params.output_padding, params.groups);
}

at::Tensor forward_transposed(at::Tensor input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                              ConvolutionParams params, const std::vector<Cut>& cuts) {
  const ConvolutionParams global = params;
  const at::Tensor own = input;
  bool nothing = input.is_meta(), no_inputs = false;
  // Of padded(), whose list starts at the last dim.
  std::vector<int64_t> pads(2 * (input.dim() - 2), 0);
  for (const Cut& cut : cuts) {
    const size_t index = cut.dim - 2;
    const Window window = window_of(global, weight, index);
    const int64_t extent = convolution_extent(global, weight, index, cut.extent);
    const auto wanted = map_shards(
        cut, extent, [&](const Interval& out) { return intersect(readers_of(out, window), Interval{0, cut.extent}); });
    const Interval in = wanted[cut.group.rank];
    const Interval out = owned(extent, cut.group.size, cut.group.rank);
    input = pull(input, cut, wanted, in);
    params.padding[index] = 0;
    params.output_padding[index] = 0;
    if (in.size() == 1) params.stride[index] = 1;  // NOTE [one output has no stride], here the outputs of the gradient
    nothing |= out.empty();
    no_inputs |= in.empty();
    // The local output covers [s·begin - p, s·(end - 1) - p + R + 1); crop or extend it to `out`.
    const int64_t first = window.stride * in.begin - window.padding;
    const int64_t last = window.stride * (in.end - 1) - window.padding + window.reach() + 1;
    const size_t place = 2 * (input.dim() - 1 - cut.dim);
    pads[place] = first - out.begin;
    pads[place + 1] = out.end - last;
  }
  if (nothing) return no_rows(own, weight, global, cuts);
  // Rows that no input reaches hold the bias alone.
  const bool grows = no_inputs || std::any_of(pads.begin(), pads.end(), [](int64_t pad) { return pad > 0; });
  at::Tensor output;
  if (no_inputs) {
    output = no_rows(own, weight, global, cuts);
  } else {
    output = padded(at::convolution(input, weight, grows ? std::nullopt : bias, params.stride, params.padding,
                                    params.dilation, true, params.output_padding, params.groups),
                    pads);
  }
  if (bias && grows) {
    std::vector<int64_t> shape(output.dim(), 1);
    shape[1] = bias->numel();
    output.add_(bias->view(shape));
  }
  return output;
}

// NOTE [padding of the filters' gradient]
// oneDNN's loops of AVX-512 for the gradient of filters end at a padding of half a window, and one local backward has
// up to a whole one: beyond, it takes 2 to 10 times as long (64 channels of 64 x 128, channels last, 3 x 3: 9.0 ms
// for 3.1), at some windows of 7 x 7 a thousand times. Zeros laid around x are the same. Not where those loops write
// nonsense, in 16 bit: volumes, and dims with one output and a stride.
bool pays_laying(const at::Tensor& dy, const at::Tensor& x, const ConvolutionParams& local) {
  if (local.transposed || !onednn_takes(x) || !onednn_is_wide()) return false;
  if (x.scalar_type() == at::kFloat) return true;
  bool trusted = x.dim() <= 4;
  for (size_t index = 0; index < local.stride.size(); ++index) {
    trusted &= local.stride[index] == 1 || dy.size(static_cast<int64_t>(index) + 2) > 1;
  }
  return trusted;
}

at::Tensor wide_padding_laid(const at::Tensor& x, const at::Tensor& weight, ConvolutionParams& local) {
  std::vector<int64_t> pads(2 * local.padding.size(), 0);
  for (size_t index = 0; index < local.padding.size(); ++index) {
    const int64_t most = (window_of(local, weight, index).reach() + 1) / 2;
    const int64_t laid = std::max<int64_t>(local.padding[index] - most, 0);
    local.padding[index] -= laid;
    const size_t place = 2 * (local.padding.size() - 1 - index);  // the list starts at the last dim
    pads[place] = pads[place + 1] = laid;
  }
  return padded(x, pads);
}

// dx and dw by ATen, on own x and the pulled dy.
std::tuple<at::Tensor, at::Tensor> backward_on_pulled(at::Tensor dy, const at::Tensor& input, const at::Tensor& weight,
                                                      const ConvolutionParams& params,
                                                      const std::array<bool, 3>& output_mask,
                                                      const std::vector<Cut>& cuts) {
  ConvolutionParams local = params;
  bool nothing = input.is_meta();
  for (const Cut& cut : cuts) {
    const size_t index = cut.dim - 2;
    const Window window = window_of(params, weight, index);
    const int64_t extent = convolution_extent(params, weight, index, cut.extent);
    const auto wanted =
        params.transposed
            ? map_shards(cut, cut.extent,
                         [&](const Interval& own) { return intersect(read_by(own, window), Interval{0, extent}); })
            : readers_of_inputs(cut, window, extent);
    const Interval own = cut.own();
    const Interval dy_rows = wanted[cut.group.rank];
    Interval frame = dy_rows;
    local.padding[index] = 0;
    local.output_padding[index] = 0;
    if (own.empty() || dy_rows.empty()) {
      nothing = true;
    } else if (params.transposed) {
      frame = read_by(own, window);
      if (own.size() == 1) local.stride[index] = 1;  // NOTE [one output has no stride]
    } else {
      const LocalBackward fitted = fit_backward(own, dy_rows, window);
      frame = fitted.frame;
      local.padding[index] = fitted.padding;
      local.stride[index] = fitted.stride;
    }
    Cut output_cut = cut;
    output_cut.extent = extent;
    dy = pull(dy, output_cut, wanted, frame);
  }
  at::Tensor grad_input, grad_weight;
  if (nothing) {
    std::tie(grad_input, grad_weight) = new_gradients(input, weight, output_mask);
    if (output_mask[0]) grad_input.zero_();
    if (output_mask[1]) grad_weight.zero_();
  } else {
    const bool by_rows = output_mask[1] && has_weight_rows(input, weight, local);
    const bool mirrored = output_mask[0] && pays_mirrored(input, weight, local);
    const at::Tensor x = by_rows ? dense(input) : input;
    const auto backward = [&](const at::Tensor& part, const ConvolutionParams& how, bool wants_dx, bool wants_dw) {
      return at::convolution_backward(dy, part, weight, c10::nullopt, how.stride, how.padding, how.dilation,
                                      how.transposed, how.output_padding, how.groups, {wants_dx, wants_dw, false});
    };
    const bool atens_dx = output_mask[0] && !mirrored, atens_dw = output_mask[1] && !by_rows;
    ConvolutionParams narrow = local;
    const at::Tensor laid = atens_dw && pays_laying(dy, x, local) ? wide_padding_laid(x, weight, narrow) : x;
    if (laid.is_same(x)) {
      if (atens_dx || atens_dw) std::tie(grad_input, grad_weight, std::ignore) = backward(x, local, atens_dx, atens_dw);
    } else {
      if (atens_dx) grad_input = std::get<0>(backward(x, local, true, false));
      grad_weight = std::get<1>(backward(laid, narrow, false, true));
    }
    if (mirrored) grad_input = mirrored_convolution(dy, weight, local);
    if (by_rows) grad_weight = weight_rows(dy, x, weight, local);
  }
  return {grad_input, grad_weight};
}

// NOTE [format of a convolution]
// Libraries answer in channels last where either factor is, or in whatever they can. Here it is one rule, so that ranks
// without rows, gradients that collectives add as memory, and fake tensors, which know neither device nor library, have
// the strides of all others.
at::Tensor in_format_of(const at::Tensor& input, const at::Tensor& weight) {
  const at::Tensor x = with_format(input);
  const auto format = convolution_format(x, weight);
  return x.suggest_memory_format() == format ? x : x.contiguous(format);
}

}  // namespace

at::MemoryFormat convolution_format(const at::Tensor& input, const at::Tensor& weight) {
  const auto format = with_format(input).suggest_memory_format();
  return format == at::MemoryFormat::Contiguous ? weight.suggest_memory_format() : format;
}

std::tuple<at::Tensor, at::Tensor> new_gradients(const at::Tensor& input, const at::Tensor& weight,
                                                 const std::array<bool, 3>& output_mask) {
  at::Tensor grad_input, grad_weight;
  if (output_mask[0]) {
    grad_input = at::empty_symint(input.sym_sizes(), input.options(), convolution_format(input, weight));
  }
  if (output_mask[1]) {
    grad_weight = at::empty_symint(weight.sym_sizes(), weight.options(), weight.suggest_memory_format());
  }
  return {grad_input, grad_weight};
}

at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       const ConvolutionParams& params, const std::vector<Cut>& cuts) {
  check_convolution("convolution", input, weight, bias, params, cuts);
  const at::Tensor x = in_format_of(input, weight);
  const at::Tensor output = params.transposed ? forward_transposed(x, weight, bias, params, cuts)
                                              : forward_conv(x, weight, bias, params, cuts);
  return output.contiguous(convolution_format(x, weight));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(const at::Tensor& grad_output,
                                                                    const at::Tensor& input, const at::Tensor& weight,
                                                                    const ConvolutionParams& params,
                                                                    const std::array<bool, 3>& output_mask,
                                                                    const std::vector<Cut>& cuts) {
  check_convolution_backward("convolution_backward", grad_output, input, weight, params, cuts);
  at::Tensor grad_input, grad_weight, grad_bias;
  const at::Tensor x = in_format_of(input, weight), dy = with_format(grad_output);
  if (has_depthwise(x, weight, params)) {
    std::tie(grad_input, grad_weight) = depthwise_backward(dy, x, weight, params, output_mask, cuts);
  } else if (pays_border_way(x, cuts) && has_border_way(x, weight, params, cuts)) {
    std::tie(grad_input, grad_weight) = border_convolution_backward(dy, x, weight, params, output_mask, cuts);
  } else {
    std::tie(grad_input, grad_weight) = backward_on_pulled(dy, x, weight, params, output_mask, cuts);
  }
  if (output_mask[0]) grad_input = grad_input.contiguous(convolution_format(x, weight));
  if (output_mask[1]) grad_weight = grad_weight.contiguous(weight.suggest_memory_format());
  if (output_mask[2]) {
    std::vector<int64_t> dims{0};
    for (int64_t dim = 2; dim < dy.dim(); ++dim) dims.push_back(dim);
    grad_bias = at::sum(dy, dims);
  }
  return {grad_input, grad_weight, grad_bias};
}

}  // namespace torchtp::spatial
