#include "spatial/interpolate.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include "kernels/interpolate.h"
#include "spatial/pull.h"
#include "spatial/slab.h"
#include "spatial/taps.h"

namespace torchtp::spatial {
namespace {

// One dim of a resampling: its taps, the output rows of this rank and the input rows they read.
struct Axis {
  int64_t dim;
  int64_t in_extent, out_extent;  // global
  Taps taps;
  const Cut* cut = nullptr;
  Interval outputs, frame;
  std::vector<Interval> wanted;  // of every rank, where the dim is cut
};

void check(at::IntArrayRef sizes, const InterpolateParams& params) {
  const int64_t num_spatial = static_cast<int64_t>(sizes.size()) - 2;
  TORCH_CHECK_VALUE(num_spatial >= 1 && static_cast<int64_t>(params.output_size.size()) == num_spatial &&
                        static_cast<int64_t>(params.scales.size()) == num_spatial,
                    "interpolate: a ", sizes.size(), "-dimensional input needs ", num_spatial,
                    " output sizes and scales, got ", params.output_size.size(), " and ", params.scales.size());
}

std::vector<Axis> make_axes(at::IntArrayRef sizes, const InterpolateParams& params, const std::vector<Cut>& cuts,
                            at::ScalarType dtype, bool backward) {
  check(sizes, params);
  std::vector<Axis> axes;
  for (size_t index = 0; index < params.output_size.size(); ++index) {
    Axis axis;
    axis.dim = static_cast<int64_t>(index) + 2;
    axis.in_extent = sizes[axis.dim];
    axis.out_extent = params.output_size[index];
    for (const Cut& cut : cuts) {
      if (cut.dim == axis.dim) axis.cut = &cut;
    }
    if (axis.cut) axis.in_extent = axis.cut->extent;
    TORCH_CHECK(axis.in_extent > 0 && axis.out_extent > 0, "interpolate: dim ", axis.dim, " goes from ", axis.in_extent,
                " to ", axis.out_extent, " rows, but both need at least one");
    axis.taps = make_taps(params.mode, axis.in_extent, axis.out_extent, params.scales[index], params.align_corners,
                          dtype, backward);
    axis.outputs = {0, axis.out_extent};
    axis.frame = {0, axis.in_extent};
    if (axis.cut) {
      for (const Interval& outputs : shards(*axis.cut, axis.out_extent)) {
        axis.wanted.push_back(axis.taps.read_by(outputs));
      }
      axis.outputs = owned(axis.out_extent, axis.cut->group.size, axis.cut->group.rank);
      axis.frame = axis.wanted[axis.cut->group.rank];
    }
    axes.push_back(std::move(axis));
  }
  return axes;
}

// [outer, extent, inner] of a dense tensor around one dim, in the order of its memory.
struct Shape {
  int64_t outer, inner;
};

Shape around(const at::Tensor& tensor, int64_t dim) {
  const bool channels_last = !tensor.is_contiguous();
  Shape shape{tensor.size(0), channels_last ? tensor.size(1) : 1};
  if (!channels_last) shape.outer *= tensor.size(1);
  for (int64_t other = 2; other < tensor.dim(); ++other) {
    if (other < dim) shape.outer *= tensor.size(other);
    if (other > dim) shape.inner *= tensor.size(other);
  }
  return shape;
}

// One dim of the resampling or of its adjoint, on rows of this rank.
at::Tensor resample(const at::Tensor& tensor, const Axis& axis, bool adjoint) {
  std::vector<int64_t> sizes = tensor.sizes().vec();
  sizes[axis.dim] = adjoint ? axis.frame.size() : axis.outputs.size();
  const auto format = tensor.is_contiguous() ? at::MemoryFormat::Contiguous : tensor.suggest_memory_format();
  at::Tensor result = at::empty(sizes, tensor.options(), format);
  if (adjoint) result.zero_();
  const Shape shape = around(tensor, axis.dim);
  if (tensor.numel() == 0 || result.numel() == 0) return result.zero_();

  const int64_t first = axis.outputs.begin * axis.taps.each;
  std::vector<int64_t> places(axis.taps.places.begin() + first,
                              axis.taps.places.begin() + axis.outputs.end * axis.taps.each);
  for (int64_t& place : places) place -= axis.frame.begin;
  const kernels::Interpolation params{axis.frame.size(), axis.outputs.size(), shape.inner,
                                      axis.taps.each,    places.data(),       axis.taps.weights.data() + first};
  const int64_t rows = std::max<int64_t>(1, 32768 / (params.out_extent * shape.inner));
  const auto run = [&](auto zero) {
    using T = decltype(zero);
    const T* const in = tensor.const_data_ptr<T>();
    T* const out = result.data_ptr<T>();
    at::parallel_for(0, shape.outer, rows, [&](int64_t begin, int64_t end) {
      if (adjoint) {
        kernels::interpolate_adjoint_cpu<T>(in, out, params, begin, end);
      } else {
        kernels::interpolate_cpu<T>(in, out, params, begin, end);
      }
    });
  };
  if (tensor.scalar_type() == at::kDouble) {
    run(double());
  } else {
    run(float());
  }
  return result;
}

// 16-bit tensors are resampled in fp32, as ATen accumulates.
at::ScalarType working_type(at::ScalarType type) { return type == at::kDouble ? at::kDouble : at::kFloat; }

// An extent that stays may still be resampled: a given scale moves the taps of the nearest modes.
bool same_rows(const Axis& axis) {
  if (axis.cut || axis.in_extent != axis.out_extent || axis.taps.each != 1) return false;
  for (int64_t row = 0; row < axis.in_extent; ++row) {
    if (axis.taps.places[row] != row) return false;
  }
  return true;
}

}  // namespace

std::vector<int64_t> interpolate_sizes(at::IntArrayRef input_sizes, const InterpolateParams& params,
                                       const std::vector<Cut>& cuts) {
  check(input_sizes, params);
  std::vector<int64_t> sizes{input_sizes[0], input_sizes[1]};
  sizes.insert(sizes.end(), params.output_size.begin(), params.output_size.end());
  for (const Cut& cut : cuts) sizes[cut.dim] = owned(sizes[cut.dim], cut.group.size, cut.group.rank).size();
  return sizes;
}

at::Tensor interpolate(const at::Tensor& input, const InterpolateParams& params, const std::vector<Cut>& cuts) {
  TORCH_CHECK(at::isFloatingType(input.scalar_type()), "interpolate: needs floating point, got ", input.scalar_type());
  const std::vector<Axis> axes = make_axes(input.sizes(), params, cuts, input.scalar_type(), false);
  at::Tensor x = dense(input);
  for (const Axis& axis : axes) {
    if (axis.cut) x = pull(x, *axis.cut, axis.wanted, axis.frame);
  }
  x = x.to(working_type(x.scalar_type()));
  // The last dim first: it has the shortest runs, and fewer rows before the others have grown.
  for (auto axis = axes.rbegin(); axis != axes.rend(); ++axis) {
    if (!same_rows(*axis)) x = resample(x, *axis, false);
  }
  return x.to(input.scalar_type());
}

at::Tensor interpolate_backward(const at::Tensor& grad_output, at::IntArrayRef input_sizes,
                                const InterpolateParams& params, const std::vector<Cut>& cuts) {
  const std::vector<Axis> axes = make_axes(input_sizes, params, cuts, grad_output.scalar_type(), true);
  at::Tensor grad = dense(grad_output).to(working_type(grad_output.scalar_type()));
  for (const Axis& axis : axes) {
    if (!same_rows(axis)) grad = resample(grad, axis, true);
  }
  for (auto axis = axes.rbegin(); axis != axes.rend(); ++axis) {
    if (axis->cut) grad = push_add(grad, *axis->cut, axis->wanted);
  }
  return grad.to(grad_output.scalar_type());
}

}  // namespace torchtp::spatial
