#include "spatial/norm_cuda.h"

#ifdef TORCHTP_CUDA
#include <ATen/Dispatch_v2.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include "kernels/norm_cuda.h"

namespace torchtp::spatial {
namespace {

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

// [rows, columns] in float, as a kernel reads them.
at::Tensor factors(const Numbers& numbers, int64_t rows, int64_t columns) {
  return numbers.to_tensor(at::kFloat, {numbers.rows(), numbers.columns()}).expand({rows, columns}).contiguous();
}

// What is found in an x without elements.
Numbers nothing(const at::Tensor& x) {
  return Numbers(at::zeros({x.size(0), x.size(1)}, x.options().dtype(at::kDouble)));
}

const float* data(const at::Tensor& factors) { return factors.const_data_ptr<float>(); }

}  // namespace

Moments moments_cuda(const at::Tensor& x) {
  const DeviceLayout layout(x, true);
  const int64_t numbers = x.size(0) * x.size(1);
  const auto options = x.options().dtype(at::kDouble);
  if (x.numel() == 0) return {nothing(x), nothing(x)};
  const OnDevice device(x);
  at::Tensor counts, mean, m2;
  AT_DISPATCH_V2(x.scalar_type(), "norm_moments", AT_WRAP([&] {
                   const scalar_t* const from = x.const_data_ptr<scalar_t>();
                   const scalar_t* const no_dy = nullptr;
                   const int64_t pieces = kernels::norm_pieces_cuda(from, no_dy, layout.shape, layout.channels_last);
                   counts = at::empty({pieces, 1}, options);
                   mean = at::empty({pieces, numbers}, options);
                   m2 = at::empty({pieces, numbers}, options);
                   kernels::launch_norm_moments(from, mean.mutable_data_ptr<double>(), m2.mutable_data_ptr<double>(),
                                                counts.mutable_data_ptr<double>(), layout.batches, layout.shape,
                                                layout.channels_last, pieces, device.stream());
                 }),
                 TORCHTP_CUDA_TYPES);
  Moments parts{Numbers(mean), Numbers(m2)};
  if (counts.size(0) > 1) parts = merge(Numbers(counts), parts);
  return {parts.mean.view(x.size(0), x.size(1)), parts.m2.view(x.size(0), x.size(1))};
}

namespace {

// scaled and scale may be undefined.
std::tuple<Numbers, Numbers> run_dots(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& center,
                                      const at::Tensor& scaled, const at::Tensor& scale) {
  const DeviceLayout layout(x, center.size(0) != 1);
  const int64_t numbers = x.size(0) * x.size(1);
  const auto options = x.options().dtype(at::kDouble);
  if (x.numel() == 0) return {nothing(x), nothing(x)};
  const OnDevice device(x);
  at::Tensor sum, dot;
  AT_DISPATCH_V2(x.scalar_type(), "norm_dots", AT_WRAP([&] {
                   const scalar_t* const from = x.const_data_ptr<scalar_t>();
                   const scalar_t* const grads = dy.const_data_ptr<scalar_t>();
                   const int64_t pieces = kernels::norm_pieces_cuda(from, grads, layout.shape, layout.channels_last);
                   sum = at::empty({pieces, numbers}, options);
                   dot = at::empty({pieces, numbers}, options);
                   kernels::launch_norm_dots(grads, from, data(center), sum.mutable_data_ptr<double>(),
                                             dot.mutable_data_ptr<double>(),
                                             scaled.defined() ? scaled.mutable_data_ptr<scalar_t>() : nullptr,
                                             scale.defined() ? data(scale) : nullptr, layout.batches, layout.shape,
                                             layout.channels_last, pieces, device.stream());
                 }),
                 TORCHTP_CUDA_TYPES);
  return {Numbers(sum).sum_rows().view(x.size(0), x.size(1)), Numbers(dot).sum_rows().view(x.size(0), x.size(1))};
}

}  // namespace

std::tuple<Numbers, Numbers> dots_cuda(const at::Tensor& dy, const at::Tensor& x, const Numbers& center) {
  return run_dots(dy, x, factors(center, center.rows(), x.size(1)), {}, {});
}

std::tuple<at::Tensor, at::Tensor> scaled_and_dots_cuda(const at::Tensor& dy, const at::Tensor& x,
                                                        const at::Tensor& scale) {
  const at::Tensor scaled = at::empty(x.sizes(), x.options(), x.suggest_memory_format());
  const auto [sum, dot] = run_dots(dy, x, at::zeros_like(scale), scaled, scale);
  return {scaled, dot.to_tensor(at::kDouble, {x.size(0), x.size(1)}).to(x.device())};
}

at::Tensor affine_cuda(const at::Tensor& x, const Numbers& center, const Numbers& scale, const Numbers& shift) {
  const int64_t rows = common(center.rows(), common(scale.rows(), shift.rows())), columns = x.size(1);
  const DeviceLayout layout(x, rows != 1);
  const OnDevice device(x);
  const at::Tensor y = at::empty(x.sizes(), x.options(), x.suggest_memory_format());
  const at::Tensor middle = factors(center, rows, columns), factor = factors(scale, rows, columns),
                   offset = factors(shift, rows, columns);
  AT_DISPATCH_V2(x.scalar_type(), "norm_affine", AT_WRAP([&] {
                   kernels::launch_norm_affine(x.const_data_ptr<scalar_t>(), y.mutable_data_ptr<scalar_t>(),
                                               data(middle), data(factor), data(offset), layout.batches, layout.shape,
                                               layout.channels_last, device.stream());
                 }),
                 TORCHTP_CUDA_TYPES);
  return y;
}

at::Tensor combine_cuda(const at::Tensor& dy, const at::Tensor& x, const Numbers& center, const Numbers& on_dy,
                        const Numbers& on_x, const Numbers& shift) {
  const int64_t rows = common(common(center.rows(), on_dy.rows()), common(on_x.rows(), shift.rows())),
                columns = x.size(1);
  const DeviceLayout layout(x, rows != 1);
  const OnDevice device(x);
  const at::Tensor dx = at::empty(x.sizes(), x.options(), x.suggest_memory_format());
  const at::Tensor middle = factors(center, rows, columns), a = factors(on_dy, rows, columns),
                   b = factors(on_x, rows, columns), offset = factors(shift, rows, columns);
  AT_DISPATCH_V2(x.scalar_type(), "norm_combine", AT_WRAP([&] {
                   kernels::launch_norm_combine(dy.const_data_ptr<scalar_t>(), x.const_data_ptr<scalar_t>(),
                                                dx.mutable_data_ptr<scalar_t>(), data(middle), data(a), data(b),
                                                data(offset), layout.batches, layout.shape, layout.channels_last,
                                                device.stream());
                 }),
                 TORCHTP_CUDA_TYPES);
  return dx;
}

}  // namespace torchtp::spatial
#endif
