#include "spatial/border_convolution.h"

#include <ATen/OpMathType.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <torch/library.h>

#include <algorithm>

#include "spatial/convolution_geometry.h"
#include "spatial/device.h"
#include "spatial/op.h"
#include "spatial/slab.h"
#include "spatial/surroundings.h"

namespace torchtp::spatial {
namespace {

// From benchmarks/gpu/dense_times.py on an H200, forward and backward: 1 to 34 % less time at 127 MiB and more
// (bfloat16, 3x3, 253 MiB: 1016 us for 1539), 5 to 6 % more at 32 MiB; at 63 MiB 12 to 15 % less in bfloat16, 6 to 7 %
// more in float32.
constexpr int64_t kLeastBytes = int64_t{64} << 20;

using Region = std::array<Interval, 2>;  // rows and columns, global

// One spatial dim of a convolution, on this rank.
struct Axis {
  Window window;
  int64_t extent, out_extent;  // global
  Interval own, out;           // of the input and of the output
  const Cut* cut = nullptr;

  // In front of own rows, with which a convolution of them begins where this rank's output does.
  int64_t padding() const { return window.padding + own.begin - window.stride * out.begin; }
  bool is_plain() const {
    return out.size() > 1 && padding() >= 0 &&
           output_extent({window.kernel, window.stride, padding(), window.dilation}, own.size()) == out.size();
  }
  // Outputs that read other ranks' rows, at both ends.
  std::array<Interval, 2> borders() const {
    Interval inside = out;
    if (own.begin > 0) inside.begin = ceil_div(own.begin + window.padding, window.stride);
    if (own.end < extent) inside.end = floor_div(own.end - 1 - window.reach() + window.padding, window.stride) + 1;
    inside.begin = std::clamp(inside.begin, out.begin, out.end);
    inside.end = std::clamp(inside.end, inside.begin, out.end);
    return {{{out.begin, inside.begin}, {inside.end, out.end}}};
  }
};

using Axes = std::array<Axis, 2>;

Axes axes_of(const at::Tensor& input, const at::Tensor& weight, const ConvolutionParams& params,
             const std::vector<Cut>& cuts) {
  Axes axes;
  for (size_t index = 0; index < 2; ++index) {
    const Window window = window_of(params, weight, index);
    const int64_t extent = input.size(static_cast<int64_t>(index) + 2), out_extent = output_extent(window, extent);
    axes[index] = {window, extent, out_extent, {0, extent}, {0, out_extent}};
  }
  for (const Cut& cut : cuts) {
    Axis& axis = axes[cut.dim - 2];
    axis.extent = cut.extent;
    axis.out_extent = output_extent(axis.window, cut.extent);
    axis.own = cut.own();
    axis.out = owned(axis.out_extent, cut.group.size, cut.group.rank);
    axis.cut = &cut;
  }
  return axes;
}

std::vector<int64_t> paddings(const Axes& axes) { return {axes[0].padding(), axes[1].padding()}; }

at::Tensor framed(const at::Tensor& tensor, const Region& have, const Region& frame) {
  return padded(tensor, {have[1].begin - frame[1].begin, frame[1].end - have[1].end, have[0].begin - frame[0].begin,
                         frame[0].end - have[0].end});
}

// Own rows and columns and those around them, which lie in pieces.
class Pieces {
 public:
  Pieces(const at::Tensor& own, const Region& place, const Surroundings& around) {
    lay(1, 1, own, place);
    const auto [above, below] = beside_of(around.above(), around.below(), 2, place[0]);
    const auto [left, right] = beside_of(around.left(), around.right(), 3, place[1]);
    lay(0, 1, around.above(), {above, place[1]});
    lay(2, 1, around.below(), {below, place[1]});
    all_ = {{{above.begin, below.end}, {left.begin, right.end}}};
    lay(1, 0, around.left(), {all_[0], left});
    lay(1, 2, around.right(), {all_[0], right});
  }

  const Region& all() const { return all_; }
  // Zeros where there is nothing.
  at::Tensor region(const Region& wanted) const {
    const Region have{intersect(wanted[0], all_[0]), intersect(wanted[1], all_[1])};
    std::vector<at::Tensor> columns;
    for (int across = 0; across < 3; ++across) {
      std::vector<at::Tensor> rows;
      for (int down = 0; down < 3; ++down) add_part(rows, pieces_[down][across], have);
      if (!rows.empty()) columns.push_back(rows.size() == 1 ? rows[0] : at::cat(rows, 2));
    }
    return framed(columns.size() == 1 ? columns[0] : at::cat(columns, 3), have, wanted);
  }

 private:
  struct Piece {
    at::Tensor tensor;
    Region place;
  };

  static std::pair<Interval, Interval> beside_of(const at::Tensor& before, const at::Tensor& after, int64_t dim,
                                                 const Interval& own) {
    return {{own.begin - (before.defined() ? before.size(dim) : 0), own.begin},
            {own.end, own.end + (after.defined() ? after.size(dim) : 0)}};
  }
  void lay(int down, int across, const at::Tensor& tensor, const Region& place) {
    pieces_[down][across] = {tensor, place};
  }
  static void add_part(std::vector<at::Tensor>& parts, const Piece& piece, const Region& wanted) {
    const Interval rows = intersect(wanted[0], piece.place[0]), columns = intersect(wanted[1], piece.place[1]);
    if (rows.empty() || columns.empty()) return;
    parts.push_back(piece.tensor.narrow(2, rows.begin - piece.place[0].begin, rows.size())
                        .narrow(3, columns.begin - piece.place[1].begin, columns.size()));
  }

  std::array<std::array<Piece, 3>, 3> pieces_;  // left and right ones are of all rows
  Region all_;
};

}  // namespace

bool has_border_way(const at::Tensor& input, const at::Tensor& weight, const ConvolutionParams& params,
                    const std::vector<Cut>& cuts) {
  if (input.dim() != 4 || params.transposed) return false;
  bool anyone_moves = false;
  for (const Cut& cut : cuts) {
    Axis axis = axes_of(input, weight, params, {cut})[cut.dim - 2];
    const std::vector<Interval> owns = shards(cut, axis.extent), outs = shards(cut, axis.out_extent);
    for (size_t rank = 0; rank < owns.size(); ++rank) {
      axis.own = owns[rank];
      axis.out = outs[rank];
      if (!axis.is_plain()) return false;
    }
    const auto wanted = read_by_outputs(cut, axis.window);
    anyone_moves |= cut.group.plans->get(cut.extent, cut.group.rank, wanted)->anyone_moves;
  }
  for (size_t index = 0; index < 2; ++index) {
    const Axis axis = axes_of(input, weight, params, cuts)[index];
    if (axis.cut == nullptr && axis.out.size() < 1) return false;
  }
  return anyone_moves;
}

bool pays_border_way(const at::Tensor& input, const std::vector<Cut>& cuts) {
  int64_t bytes = input.size(0) * input.size(1) * input.element_size();
  for (int64_t dim = 2; dim < input.dim(); ++dim) {
    const auto cut = std::find_if(cuts.begin(), cuts.end(), [&](const Cut& one) { return one.dim == dim; });
    bytes *= cut == cuts.end() ? input.size(dim) : shards(*cut, cut->extent)[0].size();
  }
  return has_cuda_kernels(input) && bytes >= kLeastBytes;
}

at::Tensor border_convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                              const ConvolutionParams& params, const std::vector<Cut>& cuts) {
  const at::Tensor x = dense(input);
  const Axes axes = axes_of(x, weight, params, cuts);
  Surroundings::Wanted wanted;
  for (const Cut& cut : cuts) wanted.push_back(read_by_outputs(cut, axes[cut.dim - 2].window));
  Surroundings surroundings(x, x.suggest_memory_format(), cuts, wanted);
  const at::Tensor y =
      at::convolution(x, weight, bias, params.stride, paddings(axes), params.dilation, false, {0, 0}, params.groups);
  surroundings.wait();
  const Pieces pieces(x, {axes[0].own, axes[1].own}, surroundings);
  for (size_t index = 0; index < 2; ++index) {
    if (axes[index].cut == nullptr) continue;
    for (const Interval& border : axes[index].borders()) {
      if (border.empty()) continue;
      Region out{axes[0].out, axes[1].out}, read;
      out[index] = border;
      std::vector<int64_t> stride = params.stride;
      for (size_t along = 0; along < 2; ++along) {
        read[along] = read_by(out[along], axes[along].window);
        if (out[along].size() == 1) stride[along] = 1;  // NOTE [one output has no stride]
      }
      const at::Tensor slab = at::convolution(pieces.region(read), weight, bias, stride, {0, 0}, params.dilation, false,
                                              {0, 0}, params.groups);
      y.narrow(static_cast<int64_t>(index) + 2, border.begin - axes[index].out.begin, border.size()).copy_(slab);
    }
  }
  surroundings.release();
  return y;
}

std::tuple<at::Tensor, at::Tensor> border_convolution_backward(const at::Tensor& grad_output, const at::Tensor& input,
                                                               const at::Tensor& weight,
                                                               const ConvolutionParams& params,
                                                               const std::array<bool, 3>& output_mask,
                                                               const std::vector<Cut>& cuts) {
  const at::Tensor x = dense(input), dy = grad_output.contiguous(x.suggest_memory_format());
  const Axes axes = axes_of(x, weight, params, cuts);
  std::vector<Cut> output_cuts = cuts;
  Surroundings::Wanted wanted;
  for (Cut& cut : output_cuts) {
    const Axis& axis = axes[cut.dim - 2];
    wanted.push_back(readers_of_inputs(cut, axis.window, axis.out_extent));
    cut.extent = axis.out_extent;
  }
  Surroundings surroundings(dy, x.suggest_memory_format(), output_cuts, wanted);
  const auto backward = [&](const at::Tensor& grad, const at::Tensor& part, const std::vector<int64_t>& stride,
                            const std::vector<int64_t>& padding) {
    return at::convolution_backward(grad, part, weight, c10::nullopt, stride, padding, params.dilation, false, {0, 0},
                                    params.groups, {output_mask[0], output_mask[1], false});
  };
  at::Tensor dx, dw;  // no structured binding: lambdas capture none in C++17
  std::tie(dx, dw, std::ignore) = backward(dy, x, params.stride, paddings(axes));
  // Shares of 16 bit would be rounded each.
  if (dw.defined()) dw = dw.to(at::toOpMathType(dw.scalar_type()));
  surroundings.wait();
  const Pieces pieces(dy, {axes[0].out, axes[1].out}, surroundings);
  const auto add_products = [&](const Region& grads) {
    Region read, frame;
    std::vector<int64_t> stride(2), padding(2);
    at::Tensor part = x, part_dx = dx;
    for (size_t index = 0; index < 2; ++index) {
      const Axis& axis = axes[index];
      read[index] = intersect(read_by(grads[index], axis.window), axis.own);
      if (read[index].empty() || grads[index].empty()) return;
      const LocalBackward fitted = fit_backward(read[index], grads[index], axis.window);
      frame[index] = fitted.frame;
      stride[index] = fitted.stride;
      padding[index] = fitted.padding;
      const auto rows = [&](const at::Tensor& tensor) {
        return tensor.narrow(static_cast<int64_t>(index) + 2, read[index].begin - axis.own.begin, read[index].size());
      };
      part = rows(part);
      if (dx.defined()) part_dx = rows(part_dx);
    }
    const auto [more_dx, more_dw, nothing] =
        backward(framed(pieces.region(grads), grads, frame), part, stride, padding);
    if (dx.defined()) part_dx.add_(more_dx);
    if (dw.defined()) dw.add_(more_dw);
  };
  // Rows with all columns there are, so that the corners are in them; then columns of own rows.
  const Region all = pieces.all(), own{axes[0].out, axes[1].out};
  add_products({Interval{all[0].begin, own[0].begin}, all[1]});
  add_products({Interval{own[0].end, all[0].end}, all[1]});
  add_products({own[0], Interval{all[1].begin, own[1].begin}});
  add_products({own[0], Interval{own[1].end, all[1].end}});
  surroundings.release();
  if (dw.defined()) dw = dw.to(weight.scalar_type()).contiguous(weight.suggest_memory_format());
  return {dx, dw};
}

namespace {

// For tests of this way on every machine, and to time it beside the other.
ConvolutionParams op_params(const char* op, const at::Tensor& input, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias, at::IntArrayRef stride, at::IntArrayRef padding,
                            at::IntArrayRef dilation, int64_t groups, const std::vector<Cut>& cuts) {
  ConvolutionParams params{stride.vec(), padding.vec(), dilation.vec(), {0, 0}, false, groups};
  TORCH_CHECK_VALUE(input.dim() == 4, op, ": input is [N, C, H, W], got ", input.dim(),
                    " dims; torchtp::convolution takes all");
  check_convolution(op, input, weight, bias, params, cuts);
  check_shards(op, input.sizes(), cuts);
  TORCH_CHECK_VALUE(has_border_way(input, weight, params, cuts), op,
                    ": every rank's part must be an image with two outputs or more whose plain "
                    "convolution has this rank's outputs; torchtp::convolution takes all");
  return params;
}

at::Tensor border_convolution_op(const at::Tensor& input, const at::Tensor& weight,
                                 const std::optional<at::Tensor>& bias, at::IntArrayRef stride, at::IntArrayRef padding,
                                 at::IntArrayRef dilation, int64_t groups, at::IntArrayRef cut_dims,
                                 at::IntArrayRef cut_extents, const Groups& cut_groups) {
  const auto cuts = make_cuts(cut_dims, cut_extents, cut_groups, input.dim());
  const auto params = op_params("border_convolution", input, weight, bias, stride, padding, dilation, groups, cuts);
  return border_convolution(input, weight, bias, params, cuts);
}

std::tuple<at::Tensor, at::Tensor> border_convolution_backward_op(const at::Tensor& grad_output,
                                                                  const at::Tensor& input, const at::Tensor& weight,
                                                                  at::IntArrayRef stride, at::IntArrayRef padding,
                                                                  at::IntArrayRef dilation, int64_t groups,
                                                                  at::IntArrayRef cut_dims, at::IntArrayRef cut_extents,
                                                                  const Groups& cut_groups) {
  const auto cuts = make_cuts(cut_dims, cut_extents, cut_groups, input.dim());
  const char* const op = "border_convolution_backward";
  const auto params = op_params(op, input, weight, {}, stride, padding, dilation, groups, cuts);
  check_convolution_backward(op, grad_output, input, weight, params, cuts);
  return border_convolution_backward(grad_output, input, weight, params, {true, true, false}, cuts);
}

void register_border_kernels(torch::Library& m) {
  m.impl("border_convolution", border_convolution_op);
  m.impl("border_convolution_backward", border_convolution_backward_op);
}

}  // namespace

TORCH_LIBRARY_IMPL(torchtp, CPU, m) { register_border_kernels(m); }
TORCH_LIBRARY_IMPL(torchtp, CUDA, m) { register_border_kernels(m); }

}  // namespace torchtp::spatial
