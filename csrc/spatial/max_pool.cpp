#include "spatial/max_pool.h"

#include <ATen/Dispatch_v2.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/max_pool2d_with_indices.h>
#include <ATen/ops/max_pool3d_with_indices.h>
#include <c10/util/Exception.h>

#include <limits>

#include "kernels/max_pool.h"

namespace torchtp::spatial {
namespace {

constexpr int64_t kPoolGrain = 32768;  // elements a thread should have at least

double lowest(at::ScalarType type) {
  if (at::isFloatingType(type)) return -std::numeric_limits<double>::infinity();
  double low = 0;
  AT_DISPATCH_V2(type, "max_pool", AT_WRAP([&] { low = static_cast<double>(std::numeric_limits<scalar_t>::lowest()); }),
                 AT_EXPAND(AT_INTEGRAL_TYPES));
  return low;
}

kernels::PoolIndex index_of(const PoolGeometry& geometry) {
  kernels::PoolIndex index{{1, 1, 1}, {1, 1, 1}, {0, 0, 0}, {1, 1, 1}};
  const int64_t skip = 3 - geometry.num_spatial();
  for (int64_t i = 0; i < geometry.num_spatial(); ++i) {
    index.frame[skip + i] = geometry.frame(i).size();
    index.global[skip + i] = geometry.extent(i);
    index.begin[skip + i] = geometry.frame(i).begin;
    index.dilation[skip + i] = geometry.window(i).dilation;
  }
  return index;
}

kernels::MaxPoolParams params_of(const PoolGeometry& geometry, const at::Tensor& outputs, at::MemoryFormat format) {
  kernels::MaxPoolParams params{1, 1, 1, 1, format != at::MemoryFormat::Contiguous, index_of(geometry)};
  const int64_t first = geometry.first_spatial();
  params.channels = outputs.size(first - 1);
  if (first > 1) params.batches = outputs.size(0);
  for (int64_t i = 0; i < geometry.num_spatial(); ++i) {
    params.outputs *= geometry.outputs(i).size();
    params.inputs *= geometry.frame(i).size();
  }
  return params;
}

template <typename F>
void for_planes(const kernels::MaxPoolParams& params, const F& f) {
  const int64_t grain = std::max<int64_t>(1, kPoolGrain / std::max<int64_t>(1, params.outputs));
  at::parallel_for(0, params.batches * params.channels, grain, f);
}

void check_cpu(const at::Tensor& tensor) {
  TORCH_CHECK_NOT_IMPLEMENTED(tensor.is_cpu() || tensor.is_meta(),
                              "max_pool: cut over ranks it runs on the CPU only, got a tensor on ", tensor.device());
}

// at:: has no 1-D pooling with a CPU kernel of its own: [C, W] and [N, C, W] become [.., 1, W].
at::Tensor with_rows(const at::Tensor& tensor, bool one_dim) { return one_dim ? tensor.unsqueeze(-2) : tensor; }

}  // namespace

std::tuple<at::Tensor, at::Tensor> max_pool(const at::Tensor& input, const PoolParams& params,
                                            const std::vector<Cut>& cuts) {
  const PoolGeometry geometry("max_pool", input.sizes(), params, cuts);
  const at::Tensor extended = geometry.pull_frames(input, lowest(input.scalar_type()));
  if (geometry.nothing() || input.is_meta()) {
    const auto sizes = geometry.output_sizes();
    const auto format = input.suggest_memory_format();
    return {at::empty(sizes, input.options(), format), at::empty(sizes, input.options().dtype(at::kLong), format)};
  }
  PoolParams local = geometry.local();
  at::Tensor output, indices;
  const bool one_dim = geometry.num_spatial() == 1;
  if (one_dim) {
    local = {
        {1, local.kernel[0]}, {1, local.stride[0]}, {0, local.padding[0]}, {1, local.dilation[0]}, local.ceil_mode};
  }
  if (geometry.num_spatial() == 3) {
    std::tie(output, indices) = at::max_pool3d_with_indices(extended, local.kernel, local.stride, local.padding,
                                                            local.dilation, local.ceil_mode);
  } else {
    std::tie(output, indices) = at::max_pool2d_with_indices(with_rows(extended, one_dim), local.kernel, local.stride,
                                                            local.padding, local.dilation, local.ceil_mode);
  }
  if (one_dim) {
    output = output.squeeze(-2);
    indices = indices.squeeze(-2);
  }
  if (!cuts.empty()) {
    check_cpu(indices);
    indices = indices.contiguous(indices.suggest_memory_format());
    const auto index = index_of(geometry);
    at::parallel_for(0, indices.numel(), kPoolGrain,
                     [&, data = indices.mutable_data_ptr<int64_t>()](int64_t begin, int64_t end) {
                       kernels::max_pool_to_global_cpu(data, index, begin, end);
                     });
  }
  return {output, indices};
}

at::Tensor max_pool_backward(const at::Tensor& grad_output, const at::Tensor& indices, at::IntArrayRef input_sizes,
                             const PoolParams& params, const std::vector<Cut>& cuts) {
  const PoolGeometry geometry("max_pool_backward", input_sizes, params, cuts);
  check_cpu(grad_output);
  const auto format = indices.suggest_memory_format();
  const at::Tensor places = indices.contiguous(format), dy = grad_output.contiguous(format);
  // Sums of 16-bit gradients are rounded once, at the end.
  const at::ScalarType sum_type = at::isReducedFloatingType(dy.scalar_type()) ? at::kFloat : dy.scalar_type();
  const at::Tensor grad = at::empty(geometry.frame_sizes(), dy.options().dtype(sum_type), format).zero_();
  if (!geometry.nothing() && !grad.is_meta()) {
    const auto plan = params_of(geometry, places, format);
    AT_DISPATCH_V2(dy.scalar_type(), "max_pool_backward", AT_WRAP([&] {
                     using acc_t = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;
                     for_planes(plan, [&](int64_t begin, int64_t end) {
                       kernels::max_pool_scatter_cpu(dy.const_data_ptr<scalar_t>(), places.const_data_ptr<int64_t>(),
                                                     grad.mutable_data_ptr<acc_t>(), plan, begin, end);
                     });
                   }),
                   AT_EXPAND(AT_FLOATING_TYPES), at::kHalf, at::kBFloat16);
  }
  return geometry.push_frames(grad).to(grad_output.scalar_type());
}

at::Tensor max_pool_gather(const at::Tensor& input, const at::Tensor& indices, const PoolParams& params,
                           const std::vector<Cut>& cuts) {
  const PoolGeometry geometry("max_pool_gather", input.sizes(), params, cuts);
  check_cpu(input);
  const auto format = indices.suggest_memory_format();
  const at::Tensor places = indices.contiguous(format);
  const at::Tensor frame = geometry.pull_frames(input, 0).contiguous(format);
  const at::Tensor out = at::empty(places.sizes(), input.options(), format);
  if (geometry.nothing() || out.is_meta()) return out;
  const auto plan = params_of(geometry, places, format);
  AT_DISPATCH_V2(input.scalar_type(), "max_pool_gather", AT_WRAP([&] {
                   for_planes(plan, [&](int64_t begin, int64_t end) {
                     kernels::max_pool_gather_cpu(frame.const_data_ptr<scalar_t>(), places.const_data_ptr<int64_t>(),
                                                  out.mutable_data_ptr<scalar_t>(), plan, begin, end);
                   });
                 }),
                 AT_EXPAND(AT_FLOATING_TYPES), at::kHalf, at::kBFloat16);
  return out;
}

}  // namespace torchtp::spatial
