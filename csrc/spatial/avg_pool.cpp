#include "spatial/avg_pool.h"

#include <ATen/ops/avg_pool2d.h>
#include <ATen/ops/avg_pool2d_backward.h>
#include <ATen/ops/avg_pool3d.h>
#include <ATen/ops/avg_pool3d_backward.h>
#include <ATen/ops/div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>

#include <algorithm>

namespace torchtp::spatial {
namespace {

// Numbers of elements that the own windows of one spatial dim divide by. PyTorch counts padding, but not what a window
// of ceil_mode has beyond it.
std::vector<int64_t> counts(const PoolGeometry& geometry, int64_t index, bool count_include_pad) {
  const Window window = geometry.window(index);
  const int64_t extent = geometry.extent(index), padding = count_include_pad ? window.padding : 0;
  std::vector<int64_t> out;
  for (int64_t o = geometry.outputs(index).begin; o < geometry.outputs(index).end; ++o) {
    const int64_t begin = window.stride * o - window.padding;
    out.push_back(std::min(begin + window.kernel, extent + padding) - std::max(begin, -padding));
  }
  return out;
}

// The divisor of every own window: one number, or a tensor that broadcasts against the output.
struct Divisors {
  std::optional<int64_t> all;
  at::Tensor each;
};

Divisors divisors(const PoolGeometry& geometry, const AvgPoolDivisor& divisor, const at::TensorOptions& options) {
  if (divisor.override_by) return {divisor.override_by, {}};
  std::vector<std::vector<int64_t>> numbers;
  int64_t all = 1;
  bool same = true;
  for (int64_t i = 0; i < geometry.num_spatial(); ++i) {
    numbers.push_back(counts(geometry, i, divisor.count_include_pad));
    const int64_t first = numbers.back()[0];
    all *= first;
    same &= std::all_of(numbers.back().begin(), numbers.back().end(), [&](int64_t one) { return one == first; });
  }
  if (same) return {all, {}};
  at::Tensor each = at::ones({1}, at::TensorOptions().dtype(at::kDouble));
  for (int64_t i = 0; i < geometry.num_spatial(); ++i) {
    std::vector<int64_t> shape(geometry.num_spatial(), 1);
    shape[i] = static_cast<int64_t>(numbers[i].size());
    const at::Tensor row = at::empty(shape, each.options());
    std::copy(numbers[i].begin(), numbers[i].end(), row.mutable_data_ptr<double>());
    each = at::mul(each, row);
  }
  return {std::nullopt, each.to(options.dtype(at::isReducedFloatingType(c10::typeMetaToScalarType(options.dtype()))
                                                  ? at::kFloat
                                                  : c10::typeMetaToScalarType(options.dtype())))};
}

// ATen's pooling of one row is the 2-D one.
struct Local {
  explicit Local(const PoolGeometry& geometry) : params(geometry.local()), one_dim(geometry.num_spatial() == 1) {
    if (one_dim) params = {{1, params.kernel[0]}, {1, params.stride[0]}, {0, params.padding[0]}, {}, params.ceil_mode};
  }
  at::Tensor wide(const at::Tensor& tensor) const { return one_dim ? tensor.unsqueeze(-2) : tensor; }
  at::Tensor narrow(const at::Tensor& tensor) const { return one_dim ? tensor.squeeze(-2) : tensor; }
  PoolParams params;
  bool one_dim;
};

at::Tensor pool(const PoolGeometry& geometry, const at::Tensor& frame, int64_t divisor) {
  const Local local(geometry);
  const PoolParams& p = local.params;
  return local.narrow(
      geometry.num_spatial() == 3
          ? at::avg_pool3d(frame, p.kernel, p.stride, p.padding, p.ceil_mode, true, divisor)
          : at::avg_pool2d(local.wide(frame), p.kernel, p.stride, p.padding, p.ceil_mode, true, divisor));
}

at::Tensor pool_backward(const PoolGeometry& geometry, const at::Tensor& dy, int64_t divisor) {
  const Local local(geometry);
  const PoolParams& p = local.params;
  // Only its sizes and layout are looked at.
  const at::Tensor frame = local.wide(at::empty(geometry.frame_sizes(), dy.options(), dy.suggest_memory_format()));
  return local.narrow(
      geometry.num_spatial() == 3
          ? at::avg_pool3d_backward(dy, frame, p.kernel, p.stride, p.padding, p.ceil_mode, true, divisor)
          : at::avg_pool2d_backward(local.wide(dy), frame, p.kernel, p.stride, p.padding, p.ceil_mode, true, divisor));
}

// What ATen has no pooling for, and here would refuse on ranks with output only.
void check_type(const at::Tensor& input, int64_t num_dims) {
  const at::ScalarType type = input.scalar_type();
  const bool refused = at::isFloatingType(type) ? num_dims == 3 && input.is_cpu() && at::isReducedFloatingType(type)
                                                : type != at::kLong || !input.is_cpu();
  TORCH_CHECK_NOT_IMPLEMENTED(!refused || input.is_meta(), "avg_pool: not implemented for ", type, " in ", num_dims,
                              " dims on ", input.device().type());
}

}  // namespace

at::MemoryFormat avg_pool_format(const PoolGeometry& geometry, const at::Tensor& like) {
  return geometry.num_spatial() == 3 ? at::MemoryFormat::Contiguous : like.suggest_memory_format();
}

at::Tensor avg_pool(const at::Tensor& input, const PoolParams& params, const AvgPoolDivisor& divisor,
                    const std::vector<Cut>& cuts) {
  TORCH_CHECK_VALUE(divisor.override_by.value_or(1) != 0, "avg_pool: divisor_override must not be 0");
  const PoolGeometry geometry("avg_pool", input.sizes(), params, cuts);
  check_type(input, geometry.num_spatial());
  // ATen refuses it of volumes alone, and here would on ranks with output only.
  for (int64_t i = 0; geometry.num_spatial() == 3 && i < 3; ++i) {
    TORCH_CHECK(geometry.window(i).kernel <= geometry.extent(i), "avg_pool: a window of ", geometry.window(i).kernel,
                " is larger than dim ", geometry.first_spatial() + i, " of global extent ", geometry.extent(i),
                " of a volume");
  }
  const at::Tensor frame = geometry.pull_frames(input, 0);
  if (geometry.nothing() || input.is_meta()) {
    return at::empty(geometry.output_sizes(), input.options(), avg_pool_format(geometry, input));
  }
  const Divisors by = divisors(geometry, divisor, input.options());
  if (by.all) return pool(geometry, frame, *by.all).contiguous(avg_pool_format(geometry, input));
  // A sum of 16 bit may overflow where the average does not; integers are divided as ATen does, towards 0.
  const at::ScalarType type = input.scalar_type();
  const at::Tensor sum = pool(geometry, at::isReducedFloatingType(type) ? frame.to(at::kFloat) : frame, 1);
  const at::Tensor output = at::isIntegralType(type, false) ? at::div(sum, by.each, "trunc") : sum.div_(by.each);
  return output.to(type).contiguous(avg_pool_format(geometry, input));
}

at::Tensor avg_pool_backward(const at::Tensor& grad_output, at::IntArrayRef input_sizes, const PoolParams& params,
                             const AvgPoolDivisor& divisor, const std::vector<Cut>& cuts) {
  TORCH_CHECK_VALUE(divisor.override_by.value_or(1) != 0, "avg_pool_backward: divisor_override must not be 0");
  const PoolGeometry geometry("avg_pool_backward", input_sizes, params, cuts);
  geometry.check_backward("avg_pool_backward", input_sizes, grad_output);
  const auto format = avg_pool_format(geometry, grad_output);
  if (geometry.nothing() || grad_output.is_meta()) {
    return geometry.push_frames(at::empty(geometry.frame_sizes(), grad_output.options(), format).zero_());
  }
  const Divisors by = divisors(geometry, divisor, grad_output.options());
  const at::Tensor dy = by.all ? grad_output : grad_output.div(by.each).to(grad_output.scalar_type());
  return geometry.push_frames(pool_backward(geometry, dy, by.all.value_or(1)).contiguous(format)).contiguous(format);
}

}  // namespace torchtp::spatial
