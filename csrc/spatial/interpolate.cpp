#include "spatial/interpolate.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/movedim.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <cmath>

#include "kernels/interpolate.h"
#include "spatial/checks.h"
#include "spatial/device.h"
#include "spatial/interpolate_cuda.h"
#include "spatial/own_taps.h"
#include "spatial/pull.h"
#include "spatial/slab.h"

namespace torchtp::spatial {
namespace {

struct Axis {
  int64_t dim;
  const Cut* cut;
  std::shared_ptr<const OwnTaps> taps;
};

void check(at::IntArrayRef sizes, const InterpolateParams& params, const std::vector<Cut>& cuts) {
  const int64_t num_spatial = static_cast<int64_t>(sizes.size()) - 2;
  TORCH_CHECK_VALUE(num_spatial >= 1 && static_cast<int64_t>(params.output_size.size()) == num_spatial &&
                        static_cast<int64_t>(params.scales.size()) == num_spatial,
                    "interpolate: a ", sizes.size(), "-dimensional input needs ", num_spatial,
                    " output sizes and scales, got ", params.output_size.size(), " and ", params.scales.size());
  for (const double scale : params.scales) {
    TORCH_CHECK_VALUE(scale >= 0 && std::isfinite(scale), "interpolate: a scale is positive and finite, or 0 for that ",
                      "of the sizes, got ", scale);
  }
  for (const Cut& cut : cuts) {
    TORCH_CHECK_VALUE(cut.dim >= 2, "interpolate: dim ", cut.dim, " is not spatial; cut one of dims 2 to ",
                      sizes.size() - 1);
  }
}

std::vector<Axis> make_axes(at::IntArrayRef sizes, const InterpolateParams& params, const std::vector<Cut>& cuts,
                            const at::Tensor& like, bool backward) {
  check(sizes, params, cuts);
  const std::vector<int64_t>& outputs = params.output_size;
  const bool rounds = like.device().is_cpu() && !backward, nearest = params.mode.rfind("nearest", 0) == 0;
  const bool small_image = rounds && outputs.size() == 2 && outputs[0] + outputs[1] <= 128;
  std::vector<int64_t> inputs = sizes.slice(2).vec();
  for (const Cut& cut : cuts) inputs[cut.dim - 2] = cut.extent;
  // Like ATen: the gradient of a bicubic image that stays as large is copied, whatever the scales say.
  const bool copied = backward && params.mode == "cubic" && inputs == outputs;
  // Four channels or more that come last ATen resamples as if small. A part of one row or none may not tell.
  const bool either = rounds && nearest && !small_image && outputs.size() > 1 && sizes[1] > 3;
  const bool as_small = small_image || (either && like.suggest_memory_format() != at::MemoryFormat::Contiguous);
  std::vector<Axis> axes;
  for (size_t index = 0; index < params.output_size.size(); ++index) {
    const auto dim = static_cast<int64_t>(index) + 2;
    const Cut* cut = nullptr;
    for (const Cut& one : cuts) {
      if (one.dim == dim) cut = &one;
    }
    Resampling resampling{copied ? "nearest" : params.mode,
                          inputs[index],
                          params.output_size[index],
                          copied ? 0 : params.scales[index],
                          params.align_corners,
                          like.scalar_type() == at::kDouble,
                          backward,
                          as_small,
                          either,
                          nearest && has_cuda_kernels(like)};
    if (cut) {
      resampling.size = cut->group.size;
      resampling.rank = cut->group.rank;
    }
    TORCH_CHECK(resampling.in_extent > 0 && resampling.out_extent > 0, "interpolate: dim ", dim, " goes from ",
                resampling.in_extent, " to ", resampling.out_extent, " rows, but both need at least one");
    axes.push_back({dim, cut, own_taps(resampling)});
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

// Where there is no kernel: as a product with the matrix of the weights, on any device.
at::Tensor resample_by_matrix(const at::Tensor& tensor, const Axis& axis, bool adjoint) {
  const OwnTaps& taps = *axis.taps;
  const int64_t outputs = taps.outputs.size(), inputs = taps.frame.size();
  at::Tensor matrix = at::zeros({outputs, inputs}, at::kDouble);
  double* const weights = matrix.mutable_data_ptr<double>();
  for (int64_t tap = 0; tap < outputs * taps.each; ++tap) {
    if (taps.places[tap] < 0) continue;  // a row of fewer taps
    weights[tap / taps.each * inputs + taps.places[tap]] += taps.weights[tap];
  }
  matrix = matrix.to(tensor.options());
  const at::Tensor rows = at::movedim(tensor, axis.dim, -1);
  const at::Tensor result = at::matmul(rows, adjoint ? matrix : matrix.t());
  return at::movedim(result, -1, axis.dim).contiguous(tensor.suggest_memory_format());
}

// One dim of the resampling or of its adjoint, on rows of this rank.
at::Tensor resample(const at::Tensor& tensor, const Axis& axis, bool adjoint) {
  if (!tensor.is_cpu() && !tensor.is_meta()) return resample_by_matrix(tensor, axis, adjoint);
  std::vector<int64_t> sizes = tensor.sizes().vec();
  const OwnTaps& taps = *axis.taps;
  sizes[axis.dim] = adjoint ? taps.frame.size() : taps.outputs.size();
  const auto format = tensor.is_contiguous() ? at::MemoryFormat::Contiguous : tensor.suggest_memory_format();
  at::Tensor result = at::empty(sizes, tensor.options(), format);
  if (adjoint) result.zero_();
  const Shape shape = around(tensor, axis.dim);
  if (tensor.is_meta() || tensor.numel() == 0 || result.numel() == 0) return result.zero_();

  const int64_t rows = std::max<int64_t>(1, 32768 / (taps.outputs.size() * shape.inner));
  const auto run = [&](auto zero) {
    using T = decltype(zero);
    const T* const in = tensor.const_data_ptr<T>();
    T* const out = result.data_ptr<T>();
    const std::vector<T> weights(taps.weights.begin(), taps.weights.end());
    const kernels::Interpolation<T> params{taps.frame.size(), taps.outputs.size(), shape.inner,
                                           taps.each,         taps.places.data(),  weights.data()};
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

#ifdef TORCHTP_CUDA
bool has_interpolate_cuda(const at::Tensor& tensor, const InterpolateParams& params) {
  return has_cuda_kernels(tensor) && params.mode.find("antialias") == std::string::npos;
}

std::vector<ResampledDim> resampled_dims(const std::vector<Axis>& axes, at::IntArrayRef input_sizes,
                                         const InterpolateParams& params) {
  std::vector<ResampledDim> dims;
  for (const Axis& axis : axes) {
    const size_t index = axis.dim - 2;
    dims.push_back({axis.cut ? axis.cut->extent : input_sizes[axis.dim], params.output_size[index], axis.taps->frame,
                    axis.taps->outputs, params.scales[index]});
  }
  return dims;
}
#endif

// 16-bit tensors are resampled in fp32, as ATen accumulates.
at::ScalarType working_type(at::ScalarType type) { return type == at::kDouble ? at::kDouble : at::kFloat; }

}  // namespace

std::vector<int64_t> interpolate_sizes(at::IntArrayRef input_sizes, const InterpolateParams& params,
                                       const std::vector<Cut>& cuts) {
  check(input_sizes, params, cuts);
  std::vector<int64_t> sizes{input_sizes[0], input_sizes[1]};
  sizes.insert(sizes.end(), params.output_size.begin(), params.output_size.end());
  for (const Cut& cut : cuts) sizes[cut.dim] = owned(sizes[cut.dim], cut.group.size, cut.group.rank).size();
  return sizes;
}

void check_interpolate_backward(const at::Tensor& grad_output, at::IntArrayRef input_sizes,
                                const InterpolateParams& params, const std::vector<Cut>& cuts) {
  const char* const op = "interpolate_backward";
  TORCH_CHECK_VALUE(at::isFloatingType(grad_output.scalar_type()), op, ": needs floating point, got ",
                    grad_output.scalar_type());
  const auto sizes = interpolate_sizes(input_sizes, params, cuts);
  check_shards(op, input_sizes, cuts);
  check_sizes(op, "grad_output", grad_output, sizes, grad_output);
}

at::Tensor interpolate(const at::Tensor& input, const InterpolateParams& params, const std::vector<Cut>& cuts) {
  TORCH_CHECK(at::isFloatingType(input.scalar_type()), "interpolate: needs floating point, got ", input.scalar_type());
  const std::vector<Axis> axes = make_axes(input.sizes(), params, cuts, input, false);
  at::Tensor x = dense(input);
  for (const Axis& axis : axes) {
    if (axis.cut) x = pull(x, *axis.cut, axis.taps->wanted, axis.taps->frame);
  }
#ifdef TORCHTP_CUDA
  if (has_interpolate_cuda(x, params)) {
    return interpolate_cuda(x, resampled_dims(axes, input.sizes(), params), params.mode, params.align_corners);
  }
#endif
  x = x.to(working_type(x.scalar_type()));
  // The last dim first: it has the shortest runs, and fewer rows before the others have grown.
  for (auto axis = axes.rbegin(); axis != axes.rend(); ++axis) {
    if (!axis->taps->copies) x = resample(x, *axis, false);
  }
  // With one row or column left on the way a tensor no longer tells.
  return x.to(input.scalar_type()).contiguous(input.suggest_memory_format());
}

at::Tensor interpolate_backward(const at::Tensor& grad_output, at::IntArrayRef input_sizes,
                                const InterpolateParams& params, const std::vector<Cut>& cuts) {
  check_interpolate_backward(grad_output, input_sizes, params, cuts);
  bool as_aten = true;  // ATen's backward of nearest modes rounds otherwise than its forward
#ifdef TORCHTP_CUDA
  as_aten = !has_interpolate_cuda(grad_output, params);  // kernels have the exact adjoint of their forward
#endif
  const std::vector<Axis> axes = make_axes(input_sizes, params, cuts, grad_output, as_aten);
  at::Tensor grad = dense(grad_output);
#ifdef TORCHTP_CUDA
  if (!as_aten) {
    grad = interpolate_adjoint_cuda(grad, resampled_dims(axes, input_sizes, params), params.mode, params.align_corners,
                                    !cuts.empty());
    for (auto axis = axes.rbegin(); axis != axes.rend(); ++axis) {
      if (axis->cut) grad = push_add(grad, *axis->cut, axis->taps->wanted);
    }
    return grad.to(grad_output.scalar_type()).contiguous(grad_output.suggest_memory_format());
  }
#endif
  grad = grad.to(working_type(grad.scalar_type()));
  for (const Axis& axis : axes) {
    if (!axis.taps->copies) grad = resample(grad, axis, true);
  }
  for (auto axis = axes.rbegin(); axis != axes.rend(); ++axis) {
    if (axis->cut) grad = push_add(grad, *axis->cut, axis->taps->wanted);
  }
  return grad.to(grad_output.scalar_type()).contiguous(grad_output.suggest_memory_format());
}

}  // namespace torchtp::spatial
