#include "spatial/max_pool.h"

#include <ATen/Dispatch_v2.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/max_pool2d_with_indices.h>
#include <ATen/ops/max_pool3d_with_indices.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <limits>

#include "kernels/max_pool.h"
#include "spatial/checks.h"
#include "spatial/device.h"

#ifdef TORCHTP_CUDA
#include "kernels/max_pool_cuda.h"
#endif

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
  kernels::MaxPoolParams params{1, 1, 1, 1, format != at::MemoryFormat::Contiguous, index_of(geometry), {}};
  const int64_t first = geometry.first_spatial();
  params.channels = outputs.size(first - 1);
  if (first > 1) params.batches = outputs.size(0);
  for (int64_t i = 0; i < 3; ++i) params.windows.outputs[i] = params.windows.kernel[i] = params.windows.stride[i] = 1;
  const PoolParams local = geometry.local();
  for (int64_t i = 0; i < geometry.num_spatial(); ++i) {
    const int64_t at = 3 - geometry.num_spatial() + i;
    params.outputs *= params.windows.outputs[at] = geometry.outputs(i).size();
    params.inputs *= geometry.frame(i).size();
    params.windows.kernel[at] = local.kernel[i];
    params.windows.stride[at] = local.stride[i];
    params.windows.padding[at] = local.padding[i];
  }
  return params;
}

template <typename F>
void for_planes(const kernels::MaxPoolParams& params, const F& f) {
  const int64_t grain = std::max<int64_t>(1, kPoolGrain / std::max<int64_t>(1, params.outputs));
  at::parallel_for(0, params.batches * params.channels, grain, f);
}

void to_global(const at::Tensor& indices, const kernels::PoolIndex& index) {
  int64_t* const data = indices.mutable_data_ptr<int64_t>();
#ifdef TORCHTP_CUDA
  if (is_on_device(indices)) {
    const OnDevice device(indices);
    kernels::launch_max_pool_to_global(data, index, indices.numel(), device.stream());
    return;
  }
#endif
  at::parallel_for(0, indices.numel(), kPoolGrain,
                   [&](int64_t begin, int64_t end) { kernels::max_pool_to_global_cpu(data, index, begin, end); });
}

// at:: has no 1-D pooling with a CPU kernel of its own: [C, W] and [N, C, W] become [.., 1, W].
at::Tensor with_rows(const at::Tensor& tensor, bool one_dim) { return one_dim ? tensor.unsqueeze(-2) : tensor; }

void refuse(const char* op, int64_t wrong, const at::Tensor& indices) {
  TORCH_CHECK_VALUE(wrong < 0, op, ": an index is that of an element that its window reads, in the global plane, got ",
                    indices.const_data_ptr<int64_t>()[wrong], "; indices are those that max_pool returned here");
}

}  // namespace

void check_indices(const char* op, const at::Tensor& indices, const PoolGeometry& geometry, const at::Tensor& like) {
  TORCH_CHECK_VALUE(indices.scalar_type() == at::kLong, op, ": indices are int64, got ", indices.scalar_type());
  check_sizes(op, "indices", indices, geometry.output_sizes(), like);
}

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
    indices = indices.contiguous(indices.suggest_memory_format());
    to_global(indices, index_of(geometry));
  }
  return {output, indices};
}

at::Tensor max_pool_backward(const at::Tensor& grad_output, const at::Tensor& indices, at::IntArrayRef input_sizes,
                             const PoolParams& params, const std::vector<Cut>& cuts) {
  const PoolGeometry geometry("max_pool_backward", input_sizes, params, cuts);
  geometry.check_backward("max_pool_backward", input_sizes, grad_output);
  check_indices("max_pool_backward", indices, geometry, grad_output);
  const auto format = indices.suggest_memory_format();
  const at::Tensor places = indices.contiguous(format), dy = grad_output.contiguous(format);
  // Sums of 16-bit gradients are rounded once, at the end: by a device's kernel, where other ranks add nothing.
  bool rounded = false;
#ifdef TORCHTP_CUDA
  rounded = is_on_device(dy) && cuts.empty();
#endif
  const at::ScalarType sum_type =
      at::isReducedFloatingType(dy.scalar_type()) && !rounded ? at::kFloat : dy.scalar_type();
  const at::Tensor grad = at::empty(geometry.frame_sizes(), dy.options().dtype(sum_type), format);
  if (grad.is_cpu() || geometry.nothing()) grad.zero_();  // a device's kernel writes every element
  if (!geometry.nothing() && !grad.is_meta()) {
    const auto plan = params_of(geometry, places, format);
    AT_DISPATCH_V2(dy.scalar_type(), "max_pool_backward", AT_WRAP([&] {
                     using acc_t = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;
                     const scalar_t* const from = dy.const_data_ptr<scalar_t>();
                     const int64_t* const at = places.const_data_ptr<int64_t>();
#ifdef TORCHTP_CUDA
                     if (is_on_device(dy)) {
                       const OnDevice device(dy);
                       const auto launch = [&](auto* to) {
                         kernels::launch_max_pool_backward(from, at, to, plan, device.stream());
                       };
                       rounded ? launch(grad.mutable_data_ptr<scalar_t>()) : launch(grad.mutable_data_ptr<acc_t>());
                       return;
                     }
#endif
                     acc_t* const to = grad.mutable_data_ptr<acc_t>();
                     std::atomic<int64_t> wrong = -1;
                     for_planes(plan, [&](int64_t begin, int64_t end) {
                       const int64_t place = kernels::max_pool_scatter_cpu(from, at, to, plan, begin, end);
                       if (place >= 0) wrong = place;
                     });
                     refuse("max_pool_backward", wrong, places);
                   }),
                   AT_EXPAND(AT_FLOATING_TYPES), at::kHalf, at::kBFloat16);
  }
  return geometry.push_frames(grad).to(grad_output.scalar_type());
}

at::Tensor max_pool_gather(const at::Tensor& input, const at::Tensor& indices, const PoolParams& params,
                           const std::vector<Cut>& cuts) {
  const PoolGeometry geometry("max_pool_gather", input.sizes(), params, cuts);
  check_indices("max_pool_gather", indices, geometry, input);
  const auto format = indices.suggest_memory_format();
  const at::Tensor places = indices.contiguous(format);
  const at::Tensor frame = geometry.pull_frames(input, 0).contiguous(format);
  const at::Tensor out = at::empty(places.sizes(), input.options(), format);
  if (geometry.nothing() || out.is_meta()) return out;
  const auto plan = params_of(geometry, places, format);
  AT_DISPATCH_V2(input.scalar_type(), "max_pool_gather", AT_WRAP([&] {
                   const scalar_t* const from = frame.const_data_ptr<scalar_t>();
                   const int64_t* const at = places.const_data_ptr<int64_t>();
                   scalar_t* const to = out.mutable_data_ptr<scalar_t>();
#ifdef TORCHTP_CUDA
                   if (is_on_device(frame)) {
                     const OnDevice device(frame);
                     kernels::launch_max_pool_gather(from, at, to, plan, device.stream());
                     return;
                   }
#endif
                   std::atomic<int64_t> wrong = -1;
                   for_planes(plan, [&](int64_t begin, int64_t end) {
                     const int64_t place = kernels::max_pool_gather_cpu(from, at, to, plan, begin, end);
                     if (place >= 0) wrong = place;
                   });
                   refuse("max_pool_gather", wrong, places);
                 }),
                 AT_EXPAND(AT_FLOATING_TYPES), at::kHalf, at::kBFloat16);
  return out;
}

}  // namespace torchtp::spatial
