#include "spatial/norm_cuda.h"

#ifdef TORCHTP_CUDA
#include <ATen/Dispatch_v2.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include "backend/reduce.h"
#include "kernels/norm_cuda.h"
#include "spatial/factors.h"

namespace torchtp::spatial {
namespace {

using Optional = std::optional<at::Tensor>;
using Ranks = std::vector<std::string>;
using Three = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using kernels::NormGroups;
using kernels::NormParts;

struct DeviceLayout {
  DeviceLayout(const at::Tensor& x, bool per_batch)
      : batches(x.size(0)),
        shape{x.size(1), 1, per_batch ? x.size(1) : 0},
        channels_last(x.suggest_memory_format() != at::MemoryFormat::Contiguous) {
    for (int64_t dim = 2; dim < x.dim(); ++dim) shape.inner *= x.size(dim);
  }

  int64_t batches;
  kernels::NormShape shape;
  bool channels_last;
};

kernels::NumberType number_type(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return kernels::NumberType::kFloat;
    case at::kDouble:
      return kernels::NumberType::kDouble;
    case at::kHalf:
      return kernels::NumberType::kHalf;
    case at::kBFloat16:
      return kernels::NumberType::kBFloat16;
    default:
      TORCH_CHECK_TYPE(false, "norm: parameters and running statistics are of a floating type, got ", type);
  }
}

// A parameter or a running statistic as kernels read it. Holds the memory until they are launched.
class Row {
 public:
  Row(const char* name, const Optional& numbers, const at::Tensor& x) {
    if (!numbers) return;
    TORCH_CHECK_VALUE(numbers->device() == x.device() && numbers->numel() == x.size(1), "norm: ", name,
                      " has a number for each of the ", x.size(1), " channels and lies on ", x.device(), ", got ",
                      numbers->numel(), " on ", numbers->device());
    kept_ = numbers->contiguous();
    original_ = *numbers;
  }
  kernels::AnyRow<const void> to_read() const {
    return kept_.defined() ? kernels::AnyRow<const void>{kept_.const_data_ptr(), number_type(kept_.scalar_type())}
                           : kernels::AnyRow<const void>{};
  }
  kernels::AnyRow<void> to_write() const {
    return kept_.defined() ? kernels::AnyRow<void>{kept_.mutable_data_ptr(), number_type(kept_.scalar_type())}
                           : kernels::AnyRow<void>{};
  }
  // Where the original could not be written itself.
  void write_back() const {
    if (kept_.defined() && !kept_.is_same(original_)) original_.copy_(kept_);
  }

 private:
  at::Tensor kept_, original_;
};

const float* data(const at::Tensor& numbers) { return data_or_null<float>(numbers); }

// What a pass that reduces left.
struct Reduced {
  at::Tensor first, second, counts;
  NormParts parts;
};

Reduced new_reduced(const at::Tensor& x, const NormGroups& groups, int64_t pieces, bool counted) {
  const auto options = x.options().dtype(at::kDouble);
  Reduced reduced{at::empty({pieces, x.size(0) * x.size(1)}, options),
                  at::empty({pieces, x.size(0) * x.size(1)}, options),
                  at::empty({counted ? pieces : 0}, options),
                  {}};
  reduced.parts =
      NormParts::of_reduction(groups, reduced.first.const_data_ptr<double>(), reduced.second.const_data_ptr<double>(),
                              reduced.counts.const_data_ptr<double>(), pieces);
  return reduced;
}

Reduced reduce_moments(const at::Tensor& x, const NormGroups& groups, cudaStream_t stream) {
  const DeviceLayout layout(x, true);
  if (x.numel() == 0) return new_reduced(x, groups, 0, true);
  Reduced reduced;
  AT_DISPATCH_V2(x.scalar_type(), "norm_moments", AT_WRAP([&] {
                   const scalar_t* const from = x.const_data_ptr<scalar_t>();
                   const scalar_t* const no_dy = nullptr;
                   const int64_t pieces = kernels::norm_pieces_cuda(from, no_dy, layout.shape, layout.channels_last);
                   reduced = new_reduced(x, groups, pieces, true);
                   kernels::launch_norm_moments(from, reduced.first.mutable_data_ptr<double>(),
                                                reduced.second.mutable_data_ptr<double>(),
                                                reduced.counts.mutable_data_ptr<double>(), layout.batches, layout.shape,
                                                layout.channels_last, pieces, stream);
                 }),
                 TORCHTP_CUDA_TYPES);
  return reduced;
}

// center, of each statistic; scaled and scale: undefined, or dy * scale on the way.
Reduced reduce_dots(const at::Tensor& dy, const at::Tensor& x, const NormGroups& groups, const at::Tensor& center,
                    const at::Tensor& scaled, const at::Tensor& scale, cudaStream_t stream) {
  const DeviceLayout layout(x, scale.defined() ? scale.size(0) != 1 : groups.num_groups > 0);
  const int64_t num_centers = groups.num_groups > 0 ? groups.num_groups : groups.channels;
  if (x.numel() == 0) return new_reduced(x, groups, 0, false);
  Reduced reduced;
  AT_DISPATCH_V2(x.scalar_type(), "norm_dots", AT_WRAP([&] {
                   const scalar_t* const from = x.const_data_ptr<scalar_t>();
                   const scalar_t* const grads = dy.const_data_ptr<scalar_t>();
                   const int64_t pieces = kernels::norm_pieces_cuda(from, grads, layout.shape, layout.channels_last);
                   reduced = new_reduced(x, groups, pieces, false);
                   kernels::launch_norm_dots(grads, from, data(center), reduced.first.mutable_data_ptr<double>(),
                                             reduced.second.mutable_data_ptr<double>(),
                                             scaled.defined() ? scaled.mutable_data_ptr<scalar_t>() : nullptr,
                                             data(scale), layout.batches, layout.shape, layout.channels_last, pieces,
                                             num_centers, stream);
                 }),
                 TORCHTP_CUDA_TYPES);
  return reduced;
}

// Factors of a pass, a row each: of [C], or of [N, C] where batches have statistics of their own.
class FactorRows {
 public:
  FactorRows(int64_t count, const at::Tensor& x, const NormGroups& groups)
      : rows_(at::empty({count, (groups.num_groups > 0 ? x.size(0) : 1) * x.size(1)}, x.options().dtype(at::kFloat))) {}
  float* row(int64_t index) const { return rows_.mutable_data_ptr<float>() + index * rows_.size(1); }

 private:
  at::Tensor rows_;
};

at::Tensor affine_by(const at::Tensor& x, const NormGroups& groups, const float* center, const float* scale,
                     const float* shift, cudaStream_t stream) {
  const DeviceLayout layout(x, groups.num_groups > 0);
  const at::Tensor y = at::empty(x.sizes(), x.options(), x.suggest_memory_format());
  AT_DISPATCH_V2(x.scalar_type(), "norm_affine", AT_WRAP([&] {
                   kernels::launch_norm_affine(x.const_data_ptr<scalar_t>(), y.mutable_data_ptr<scalar_t>(), center,
                                               scale, shift, layout.batches, layout.shape, layout.channels_last,
                                               stream);
                 }),
                 TORCHTP_CUDA_TYPES);
  return y;
}

at::Tensor combine_by(const at::Tensor& dy, const at::Tensor& x, const NormGroups& groups, const FactorRows& factors,
                      cudaStream_t stream) {
  const DeviceLayout layout(x, groups.num_groups > 0);
  const at::Tensor dx = at::empty(x.sizes(), x.options(), x.suggest_memory_format());
  AT_DISPATCH_V2(x.scalar_type(), "norm_combine", AT_WRAP([&] {
                   kernels::launch_norm_combine(dy.const_data_ptr<scalar_t>(), x.const_data_ptr<scalar_t>(),
                                                dx.mutable_data_ptr<scalar_t>(), factors.row(0), factors.row(1),
                                                factors.row(2), factors.row(3), layout.batches, layout.shape,
                                                layout.channels_last, stream);
                 }),
                 TORCHTP_CUDA_TYPES);
  return dx;
}

// (y, mean, invstd). The last two have a number for each statistic; none where it is the running ones that are used.
Three norm_forward(const at::Tensor& x, const Optional& weight, const Optional& bias, const NormGroups& groups,
                   const BatchNormParams& params, const Ranks& ranks) {
  const OnDevice device(x);
  const int64_t statistics = groups.statistics();
  const auto options = x.options().dtype(at::kFloat);
  const Row w("weight", weight, x), b("bias", bias, x), running_mean("running_mean", params.running_mean, x),
      running_var("running_var", params.running_var, x);
  const at::Tensor mean = at::empty({params.training ? statistics : 0}, options),
                   invstd = at::empty({params.training ? statistics : 0}, options);
  const FactorRows factors(3, x, groups);
  kernels::NormFinish finish;
  finish.groups = groups;
  finish.constant = !params.training;
  finish.eps = params.eps;
  finish.momentum = params.momentum;
  Reduced reduced;
  at::Tensor message, messages;
  if (params.training) {
    reduced = reduce_moments(x, groups, device.stream());
    finish.parts = reduced.parts;
  }
  if (params.training && !ranks.empty()) {
    message = at::empty({1 + 2 * statistics}, x.options().dtype(at::kDouble));
    finish.message = message.mutable_data_ptr<double>();
    kernels::launch_norm_finish(finish, device.stream());
    finish.message = nullptr;
    messages = backend::all_gather(message, ranks);  // the same order, and so the same bits, on all ranks
    finish.parts = NormParts::of_messages(messages.const_data_ptr<double>(), messages.size(0), statistics);
  }
  finish.weight = w.to_read();
  finish.bias = b.to_read();
  finish.running_mean = running_mean.to_write();
  finish.running_var = running_var.to_write();
  finish.mean = mean.mutable_data_ptr<float>();
  finish.invstd = invstd.mutable_data_ptr<float>();
  finish.center = factors.row(0);
  finish.scale = factors.row(1);
  finish.shift = factors.row(2);
  kernels::launch_norm_finish(finish, device.stream());
  if (params.training) {
    running_mean.write_back();
    running_var.write_back();
  }
  return {affine_by(x, groups, finish.center, finish.scale, finish.shift, device.stream()), mean, invstd};
}

at::Tensor wide(const at::Tensor& statistics, const NormGroups& groups, const at::Tensor& x) {
  TORCH_CHECK_VALUE(statistics.device() == x.device() && statistics.numel() == groups.statistics(),
                    "norm backward: it needs ", groups.statistics(), " saved statistics on ", x.device(), ", got ",
                    statistics.numel(), " on ", statistics.device());
  return statistics.to(at::kFloat).contiguous();
}

Three norm_backward(const at::Tensor& dy, const at::Tensor& x, const Optional& weight, const at::Tensor& saved_mean,
                    const at::Tensor& saved_invstd, const NormGroups& groups, const BatchNormParams& params,
                    const std::array<bool, 3>& mask, const Ranks& ranks) {
  const OnDevice device(x);
  const bool through = params.training && mask[0];  // gradients go through the statistics
  const auto options = x.options().dtype(weight ? weight->scalar_type() : at::kFloat);
  const auto running = [&](const Optional& numbers) { return params.training ? Optional() : numbers; };
  const Row w("weight", weight, x), running_mean("running_mean", running(params.running_mean), x),
      running_var("running_var", running(params.running_var), x);
  const at::Tensor mean = wide(params.training ? saved_mean : *params.running_mean, groups, x),
                   invstd = params.training ? wide(saved_invstd, groups, x) : at::Tensor();
  at::Tensor grad_weight, grad_bias;
  if (mask[1]) grad_weight = at::empty({x.size(1)}, options);
  if (mask[2]) grad_bias = at::empty({x.size(1)}, options);
  const auto to_write = [](const at::Tensor& tensor) {
    return tensor.defined() ? kernels::AnyRow<void>{tensor.mutable_data_ptr(), number_type(tensor.scalar_type())}
                            : kernels::AnyRow<void>{};
  };

  kernels::NormGradFinish finish;
  finish.groups = groups;
  finish.constant = !params.training;
  finish.eps = params.eps;
  finish.number = static_cast<double>(groups.members() * DeviceLayout(x, false).shape.inner);
  finish.weight = w.to_read();
  finish.running_var = running_var.to_read();
  finish.mean = data(mean);
  finish.invstd = data(invstd);
  finish.grad_weight = to_write(grad_weight);
  finish.grad_bias = to_write(grad_bias);
  Reduced reduced;
  if (through || mask[1] || mask[2]) {
    reduced = reduce_dots(dy, x, groups, mean, {}, {}, device.stream());
    finish.parts = reduced.parts;
    finish.weighed = groups.num_groups > 0;
  }
  at::Tensor message;
  if (through && !ranks.empty()) {
    const int64_t statistics = groups.statistics();
    message = at::empty({2 * statistics + 1}, x.options().dtype(at::kDouble));
    finish.message = message.mutable_data_ptr<double>();
    kernels::launch_norm_finish(finish, device.stream());
    backend::all_reduce(message, ranks);
    finish.parts = NormParts::of_sums(finish.message, statistics);
    finish.total = finish.message + 2 * statistics;
    finish.message = nullptr;
    finish.weighed = false;
    finish.grad_weight = finish.grad_bias = {};
  }
  const FactorRows factors(mask[0] ? 4 : 0, x, groups);
  if (mask[0]) {
    finish.center = factors.row(0);
    finish.on_dy = factors.row(1);
    finish.on_x = factors.row(2);
    finish.shift = factors.row(3);
  }
  kernels::launch_norm_finish(finish, device.stream());
  at::Tensor grad_input;
  if (through) grad_input = combine_by(dy, x, groups, factors, device.stream());
  // Center and shift are zero.
  if (mask[0] && !through) {
    grad_input = affine_by(dy, groups, finish.center, finish.on_dy, finish.shift, device.stream());
  }
  return {grad_input, grad_weight, grad_bias};
}

NormGroups channels_of(const at::Tensor& x) { return {x.size(0), x.size(1), 0}; }
NormGroups groups_of(const at::Tensor& x, int64_t num_groups) { return {x.size(0), x.size(1), num_groups}; }

}  // namespace

Three batch_norm_cuda(const at::Tensor& x, const Optional& weight, const Optional& bias, const BatchNormParams& params,
                      const Ranks& ranks) {
  return norm_forward(x, weight, bias, channels_of(x), params, ranks);
}

Three batch_norm_backward_cuda(const at::Tensor& dy, const at::Tensor& x, const Optional& weight,
                               const at::Tensor& save_mean, const at::Tensor& save_invstd,
                               const BatchNormParams& params, const std::array<bool, 3>& output_mask,
                               const Ranks& ranks) {
  return norm_backward(dy, x, weight, save_mean, save_invstd, channels_of(x), params, output_mask, ranks);
}

Three group_norm_cuda(const at::Tensor& x, const Optional& weight, const Optional& bias, int64_t num_groups, double eps,
                      const Ranks& ranks) {
  BatchNormParams params;
  params.eps = eps;
  const auto [y, mean, rstd] = norm_forward(x, weight, bias, groups_of(x, num_groups), params, ranks);
  return {y, mean.view({x.size(0), num_groups}), rstd.view({x.size(0), num_groups})};
}

Three group_norm_backward_cuda(const at::Tensor& dy, const at::Tensor& x, const Optional& weight,
                               const at::Tensor& mean, const at::Tensor& rstd, int64_t num_groups,
                               const std::array<bool, 3>& output_mask, const Ranks& ranks) {
  return norm_backward(dy, x, weight, mean, rstd, groups_of(x, num_groups), {}, output_mask, ranks);
}

std::tuple<at::Tensor, at::Tensor> scaled_and_dots_cuda(const at::Tensor& dy, const at::Tensor& x,
                                                        const at::Tensor& scale, const at::Tensor& keep,
                                                        at::ScalarType type) {
  const OnDevice device(x);
  at::Tensor scaled;
  if (scale.defined()) scaled = at::empty(x.sizes(), x.options(), x.suggest_memory_format());
  const at::Tensor products = at::empty({x.size(1)}, x.options().dtype(type));
  kernels::NormGradFinish finish;
  finish.groups = groups_of(x, 1);  // a factor for each batch
  const Reduced reduced = reduce_dots(dy, x, finish.groups, {}, scaled, scale, device.stream());
  finish.parts = reduced.parts;
  finish.invstd = data(keep);
  finish.grad_weight = {products.mutable_data_ptr(), number_type(type)};
  kernels::launch_norm_finish(finish, device.stream());
  return {scaled, products};
}

}  // namespace torchtp::spatial
#endif
