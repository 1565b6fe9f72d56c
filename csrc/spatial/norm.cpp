#include "spatial/norm.h"

#include <ATen/Dispatch_v2.h>
#include <ATen/Parallel.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>

#include "backend/reduce.h"
#include "core/interval.h"
#include "kernels/norm.h"

namespace torchtp::spatial {
namespace {

constexpr int64_t kGrain = 32768;   // elements a thread should have at least
constexpr int64_t kMaxPieces = 16;  // of one batch, where the channels lie innermost

struct Layout {
  explicit Layout(const at::Tensor& x, int64_t batch_stride = 0)
      : batches(x.size(0)),
        shape{x.size(1), 1, batch_stride},
        channels_last(x.suggest_memory_format() != at::MemoryFormat::Contiguous) {
    for (int64_t dim = 2; dim < x.dim(); ++dim) shape.inner *= x.size(dim);
  }
  int64_t units() const { return batches * (channels_last ? shape.inner : shape.channels); }
  int64_t grain() const {
    return std::max<int64_t>(1, kGrain / std::max<int64_t>(1, channels_last ? shape.channels : shape.inner));
  }
  // Rows of one batch are reduced in as many pieces, whatever the number of threads.
  int64_t pieces() const {
    if (!channels_last) return 1;
    return std::clamp<int64_t>(shape.inner * shape.channels / kGrain, 1, kMaxPieces);
  }
  Interval piece(int64_t index) const { return {shape.inner * index / pieces(), shape.inner * (index + 1) / pieces()}; }

  int64_t batches;
  kernels::NormShape shape;
  bool channels_last;
};

at::Tensor factors(const at::Tensor& numbers, at::ScalarType type) {
  return numbers.to(statistics_type(type)).contiguous();
}

// [N or 1, C] as it broadcasts against x.
at::Tensor beside(const at::Tensor& numbers, const at::Tensor& x) {
  std::vector<int64_t> shape(x.dim(), 1);
  shape[0] = numbers.size(0);
  shape[1] = numbers.size(1);
  return numbers.view(shape);
}

std::vector<int64_t> inner_dims(const at::Tensor& x) {
  std::vector<int64_t> dims;
  for (int64_t dim = 2; dim < x.dim(); ++dim) dims.push_back(dim);
  return dims;
}

at::Tensor sum_inner(const at::Tensor& x) { return x.dim() > 2 ? at::sum(x, inner_dims(x)) : x; }

int64_t batch_stride(const at::Tensor& numbers) { return numbers.size(0) == 1 ? 0 : numbers.size(1); }

#define TORCHTP_DISPATCH(TYPE, NAME, ...) \
  AT_DISPATCH_V2(TYPE, NAME, AT_WRAP(__VA_ARGS__), AT_EXPAND(AT_FLOATING_TYPES), at::kHalf, at::kBFloat16)

}  // namespace

at::ScalarType statistics_type(at::ScalarType type) { return type == at::kDouble ? at::kDouble : at::kFloat; }

Moments merge(const at::Tensor& counts, const Moments& parts) {
  const at::Tensor total = counts.sum(0).clamp_min(1);
  const at::Tensor mean = parts.mean.mul(counts).sum(0).div_(total);
  const at::Tensor off = parts.mean.sub(mean);
  return {mean, parts.m2.sum(0).add_(off.mul_(off).mul_(counts).sum(0))};
}

Moments moments(const at::Tensor& x) {
  const Layout layout(x);
  const auto options = x.options().dtype(at::kDouble);
  if (layout.shape.inner == 0)
    return {at::zeros({x.size(0), x.size(1)}, options), at::zeros({x.size(0), x.size(1)}, options)};
  if (!x.is_cpu()) {
    const at::Tensor wide = x.to(statistics_type(x.scalar_type()));
    const at::Tensor mean = sum_inner(wide).div_(static_cast<double>(layout.shape.inner));
    const at::Tensor off = wide.sub(beside(mean, x));
    return {mean.to(at::kDouble), sum_inner(off.mul(off)).to(at::kDouble)};
  }
  const int64_t pieces = layout.pieces(), numbers = x.size(0) * x.size(1);
  const at::Tensor mean = at::empty({pieces, x.size(0), x.size(1)}, options), m2 = at::empty_like(mean);
  double* const out_mean = mean.mutable_data_ptr<double>();
  double* const out_m2 = m2.mutable_data_ptr<double>();
  TORCHTP_DISPATCH(x.scalar_type(), "norm_moments", [&] {
    const scalar_t* data = x.const_data_ptr<scalar_t>();
    if (!layout.channels_last) {
      at::parallel_for(0, layout.units(), layout.grain(), [&](int64_t begin, int64_t end) {
        kernels::norm_moments_planes_cpu(data, layout.shape, out_mean, out_m2, begin, end);
      });
      return;
    }
    at::parallel_for(0, layout.batches * pieces, 1, [&](int64_t begin, int64_t end) {
      for (int64_t work = begin; work < end; ++work) {
        const int64_t batch = work / pieces, at = work % pieces * numbers + batch * layout.shape.channels;
        const Interval rows = layout.piece(work % pieces);
        kernels::norm_moments_rows_cpu(data + batch * layout.shape.inner * layout.shape.channels, layout.shape,
                                       out_mean + at, out_m2 + at, rows.begin, rows.end);
      }
    });
  });
  if (pieces == 1) return {mean.squeeze(0), m2.squeeze(0)};
  const at::Tensor counts = at::empty({pieces, 1, 1}, options);
  for (int64_t i = 0; i < pieces; ++i)
    counts.mutable_data_ptr<double>()[i] = static_cast<double>(layout.piece(i).size());
  return merge(counts, {mean, m2});
}

std::tuple<at::Tensor, at::Tensor> dots(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& center) {
  const Layout layout(x, batch_stride(center));
  const auto options = x.options().dtype(at::kDouble);
  const at::Tensor middle = factors(center, x.scalar_type());
  if (!x.is_cpu()) {
    const at::Tensor wide = dy.to(statistics_type(x.scalar_type()));
    return {sum_inner(wide).to(at::kDouble), sum_inner(x.sub(beside(middle, x)).mul_(wide)).to(at::kDouble)};
  }
  const int64_t pieces = layout.pieces(), numbers = x.size(0) * x.size(1);
  const at::Tensor sum = at::empty({pieces, x.size(0), x.size(1)}, options), dot = at::empty_like(sum);
  double* const out_sum = sum.mutable_data_ptr<double>();
  double* const out_dot = dot.mutable_data_ptr<double>();
  TORCHTP_DISPATCH(x.scalar_type(), "norm_dots", [&] {
    using acc_t = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;
    const scalar_t* grads = dy.const_data_ptr<scalar_t>();
    const scalar_t* data = x.const_data_ptr<scalar_t>();
    const acc_t* centers = middle.const_data_ptr<acc_t>();
    if (!layout.channels_last) {
      at::parallel_for(0, layout.units(), layout.grain(), [&](int64_t begin, int64_t end) {
        kernels::norm_dots_planes_cpu(grads, data, centers, layout.shape, out_sum, out_dot, begin, end);
      });
      return;
    }
    at::parallel_for(0, layout.batches * pieces, 1, [&](int64_t begin, int64_t end) {
      for (int64_t work = begin; work < end; ++work) {
        const int64_t batch = work / pieces, at = work % pieces * numbers + batch * layout.shape.channels;
        const int64_t first = batch * layout.shape.inner * layout.shape.channels;
        const Interval rows = layout.piece(work % pieces);
        kernels::norm_dots_rows_cpu(grads + first, data + first, centers + batch * layout.shape.batch_stride,
                                    layout.shape, out_sum + at, out_dot + at, rows.begin, rows.end);
      }
    });
  });
  return {sum.sum(0), dot.sum(0)};
}

at::Tensor affine(const at::Tensor& x, const at::Tensor& center, const at::Tensor& scale, const at::Tensor& shift) {
  const at::Tensor middle = factors(center, x.scalar_type()),
                   factor = factors(scale.expand_as(center), x.scalar_type()),
                   offset = factors(shift.expand_as(center), x.scalar_type());
  if (!x.is_cpu()) {
    return x.sub(beside(middle, x)).mul_(beside(factor, x)).add_(beside(offset, x)).to(x.scalar_type());
  }
  const Layout layout(x, batch_stride(middle));
  const at::Tensor y = at::empty(x.sizes(), x.options(), x.suggest_memory_format());
  TORCHTP_DISPATCH(x.scalar_type(), "norm_affine", [&] {
    using acc_t = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;
    at::parallel_for(0, layout.units(), layout.grain(), [&](int64_t begin, int64_t end) {
      kernels::norm_affine_cpu(x.const_data_ptr<scalar_t>(), y.mutable_data_ptr<scalar_t>(),
                               middle.const_data_ptr<acc_t>(), factor.const_data_ptr<acc_t>(),
                               offset.const_data_ptr<acc_t>(), layout.shape, layout.channels_last, begin, end);
    });
  });
  return y;
}

at::Tensor combine(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& center, const at::Tensor& on_dy,
                   const at::Tensor& on_x, const at::Tensor& shift) {
  const auto type = x.scalar_type();
  const at::Tensor middle = factors(center.expand_as(on_dy), type), a = factors(on_dy, type), b = factors(on_x, type),
                   offset = factors(shift, type);
  if (!x.is_cpu()) {
    return x.sub(beside(middle, x)).mul_(beside(b, x)).add_(dy.mul(beside(a, x))).add_(beside(offset, x)).to(type);
  }
  const Layout layout(x, batch_stride(a));
  const at::Tensor dx = at::empty(x.sizes(), x.options(), x.suggest_memory_format());
  TORCHTP_DISPATCH(type, "norm_combine", [&] {
    using acc_t = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;
    at::parallel_for(0, layout.units(), layout.grain(), [&](int64_t begin, int64_t end) {
      kernels::norm_combine_cpu(dy.const_data_ptr<scalar_t>(), x.const_data_ptr<scalar_t>(),
                                dx.mutable_data_ptr<scalar_t>(), middle.const_data_ptr<acc_t>(),
                                a.const_data_ptr<acc_t>(), b.const_data_ptr<acc_t>(), offset.const_data_ptr<acc_t>(),
                                layout.shape, layout.channels_last, begin, end);
    });
  });
  return dx;
}

std::tuple<Moments, at::Tensor> merge_over(const Moments& mine, int64_t count, const std::vector<std::string>& groups) {
  const at::Tensor number = at::full({1}, static_cast<double>(count), mine.mean.options());
  const at::Tensor all = backend::all_gather(at::cat({number, mine.mean.reshape({-1}), mine.m2.reshape({-1})}), groups);
  const int64_t numbers = mine.mean.numel();
  const at::Tensor counts = all.narrow(1, 0, 1);
  const Moments merged = merge(counts, {all.narrow(1, 1, numbers), all.narrow(1, 1 + numbers, numbers)});
  return {{merged.mean.view(mine.mean.sizes()), merged.m2.view(mine.mean.sizes())}, counts.sum()};
}

}  // namespace torchtp::spatial
