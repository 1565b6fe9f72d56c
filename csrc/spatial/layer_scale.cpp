#include "spatial/layer_scale.h"

#include <ATen/Dispatch_v2.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include "kernels/layer_scale.h"
#include "spatial/checks.h"
#include "spatial/device.h"
#include "spatial/factors.h"
#include "spatial/norm.h"
#include "spatial/norm_cuda.h"
#include "spatial/slab.h"

#ifdef TORCHTP_CUDA
#include "kernels/layer_scale_cuda.h"
#endif

namespace torchtp::spatial {
namespace {

using Optional = std::optional<at::Tensor>;

constexpr int64_t kUnit = 16;           // elements; a piece of work begins at a multiple of it
constexpr int64_t kScaleGrain = 16384;  // elements a thread should have at least

// `other`: the residual or the gradient, which is like the branch.
void check(const char* op, const char* name, const at::Tensor& other, const at::Tensor& branch, const Optional& gamma,
           const Optional& keep) {
  TORCH_CHECK_VALUE(branch.dim() >= 2, op, ": branch needs dims [N, C, ...], got ", branch.dim());
  check_row(op, "gamma", gamma, branch);
  check_row(op, "keep", keep, branch, 0);
  TORCH_CHECK_VALUE(other.scalar_type() == branch.scalar_type(), op, ": ", name, " and branch are alike in dtype, got ",
                    other.scalar_type(), " and ", branch.scalar_type());
  check_sizes(op, name, other, branch.sym_sizes(), branch);
}

// residual may be undefined: then branch * gamma * keep.
at::Tensor apply(const at::Tensor& residual, const at::Tensor& branch, const Optional& gamma, const Optional& keep) {
  const at::Tensor x = dense(branch);
  const auto format = x.suggest_memory_format();
  const at::Tensor base = residual.defined() ? residual.contiguous(format) : at::Tensor();
  const at::Tensor out = at::empty(x.sizes(), x.options(), format);
  const auto type = statistics_type(x.scalar_type());
  const at::Tensor g = factors(gamma, type), k = factors(keep, type);
  const bool channels_last = format != at::MemoryFormat::Contiguous;
  const int64_t planes = std::max<int64_t>(1, x.size(0) * x.size(1));
  if (x.numel() == 0) return out;
  AT_DISPATCH_V2(x.scalar_type(), "layer_scale", AT_WRAP([&] {
                   using acc_t = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;
                   const kernels::LayerScaleParams<scalar_t, acc_t> params{data_or_null<scalar_t>(base),
                                                                           x.const_data_ptr<scalar_t>(),
                                                                           data_or_null<acc_t>(g),
                                                                           data_or_null<acc_t>(k),
                                                                           out.mutable_data_ptr<scalar_t>(),
                                                                           x.size(0),
                                                                           x.size(1),
                                                                           x.numel() / planes};
#ifdef TORCHTP_CUDA
                   if (is_on_device(x)) {
                     const OnDevice device(x);
                     kernels::launch_layer_scale(params, channels_last, device.stream());
                     return;
                   }
#endif
                   const int64_t units = (x.numel() + kUnit - 1) / kUnit;
                   at::parallel_for(0, units, kScaleGrain / kUnit, [&](int64_t begin, int64_t end) {
                     kernels::layer_scale_cpu(params, channels_last, begin * kUnit, std::min(end * kUnit, x.numel()));
                   });
                 }),
                 AT_EXPAND(AT_FLOATING_TYPES), at::kHalf, at::kBFloat16);
  return out;
}

}  // namespace

void check_layer_scale(const at::Tensor& residual, const at::Tensor& branch, const Optional& gamma,
                       const Optional& keep) {
  check("layer_scale", "residual", residual, branch, gamma, keep);
}

void check_layer_scale_backward(const at::Tensor& grad_output, const at::Tensor& branch, const Optional& gamma,
                                const Optional& keep) {
  check("layer_scale_backward", "grad_output", grad_output, branch, gamma, keep);
}

at::Tensor layer_scale(const at::Tensor& residual, const at::Tensor& branch, const Optional& gamma,
                       const Optional& keep) {
  check_layer_scale(residual, branch, gamma, keep);
  return apply(residual, branch, gamma, keep);
}

std::tuple<at::Tensor, at::Tensor> layer_scale_backward(const at::Tensor& grad_output, const at::Tensor& branch,
                                                        const Optional& gamma, const Optional& keep,
                                                        const std::array<bool, 2>& output_mask) {
  check_layer_scale_backward(grad_output, branch, gamma, keep);
  const at::Tensor x = dense(branch), dy = grad_output.contiguous(x.suggest_memory_format());
  const bool wants_gamma = output_mask[1] && gamma;
#ifdef TORCHTP_CUDA
  if (wants_gamma && has_cuda_kernels(x)) {
    at::Tensor scale;
    if (output_mask[0]) {
      scale = gamma->to(at::kFloat).unsqueeze(0);
      if (keep) scale = at::mul(scale, keep->to(at::kFloat).unsqueeze(1));
      scale = scale.contiguous();
    }
    return scaled_and_dots_cuda(dy, x, scale, factors(keep, at::kFloat), gamma->scalar_type());
  }
#endif
  at::Tensor grad_branch, grad_gamma;
  if (output_mask[0]) grad_branch = apply({}, dy, gamma, keep);
  if (wants_gamma) {
    const int64_t batches = x.size(0), channels = x.size(1);
    const Numbers zero =
        x.is_cpu() ? Numbers(1, channels) : Numbers(at::zeros({channels}, x.options().dtype(at::kDouble)));
    at::Tensor products =
        std::get<1>(dots(dy, x, zero)).to_tensor(at::kDouble, {batches, channels}).to(branch.device());
    if (keep) products = at::mul(products, keep->to(at::kDouble).unsqueeze(1));
    grad_gamma = at::sum(products, {0}).to(gamma->scalar_type());
  }
  return {grad_branch, grad_gamma};
}

}  // namespace torchtp::spatial
