#include "spatial/norm.h"

#include <ATen/Dispatch_v2.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>
#include <c10/util/Exception.h>

#include "backend/reduce.h"
#include "core/interval.h"
#include "kernels/norm.h"

namespace torchtp::spatial {
namespace {

constexpr int64_t kNormGrain = 32768;  // elements a thread should have at least
constexpr int64_t kMaxPieces = 16;     // of one batch, where the channels lie innermost

struct Layout {
  explicit Layout(const at::Tensor& x, int64_t batch_stride = 0)
      : batches(x.size(0)),
        shape{x.size(1), 1, batch_stride},
        channels_last(x.suggest_memory_format() != at::MemoryFormat::Contiguous) {
    for (int64_t dim = 2; dim < x.dim(); ++dim) shape.inner *= x.size(dim);
  }
  int64_t units() const { return batches * (channels_last ? shape.inner : shape.channels); }
  int64_t grain() const {
    return std::max<int64_t>(1, kNormGrain / std::max<int64_t>(1, channels_last ? shape.channels : shape.inner));
  }
  // Rows of one batch are reduced in as many pieces, whatever the number of threads.
  int64_t pieces() const {
    if (!channels_last) return 1;
    return std::clamp<int64_t>(shape.inner * shape.channels / kNormGrain, 1, kMaxPieces);
  }
  Interval piece(int64_t index) const { return {shape.inner * index / pieces(), shape.inner * (index + 1) / pieces()}; }

  int64_t batches;
  kernels::NormShape shape;
  bool channels_last;
};

// Not on the CPU: numbers as they broadcast against x.
at::Tensor beside(const Numbers& numbers, const at::Tensor& x) {
  std::vector<int64_t> shape(x.dim(), 1);
  shape[0] = numbers.rows();
  shape[1] = numbers.columns();
  return numbers.to_tensor(statistics_type(x.scalar_type()), shape);
}

std::vector<int64_t> inner_dims(const at::Tensor& x) {
  std::vector<int64_t> dims;
  for (int64_t dim = 2; dim < x.dim(); ++dim) dims.push_back(dim);
  return dims;
}

at::Tensor sum_inner(const at::Tensor& x) { return x.dim() > 2 ? at::sum(x, inner_dims(x)) : x; }

#define TORCHTP_DISPATCH(TYPE, NAME, ...) \
  AT_DISPATCH_V2(TYPE, NAME, AT_WRAP(__VA_ARGS__), AT_EXPAND(AT_FLOATING_TYPES), at::kHalf, at::kBFloat16)

}  // namespace

at::ScalarType statistics_type(at::ScalarType type) { return type == at::kDouble ? at::kDouble : at::kFloat; }

Moments merge(const Numbers& counts, const Moments& parts) {
  const Numbers total = map([](const auto& n) { return at_least(n, 1); }, counts.sum_rows());
  const Numbers mean = quotient(product(parts.mean, counts).sum_rows(), total);
  const Numbers between = map(
      [](const auto& part, const auto& whole, const auto& n) {
        const auto off = part - whole;
        return off * off * n;
      },
      parts.mean, mean, counts);
  return {mean, map([](const auto& a, const auto& b) { return a + b; }, parts.m2.sum_rows(), between.sum_rows())};
}

Moments moments(const at::Tensor& x) {
  // A rank without elements would wait for those that refuse theirs.
  TORCH_CHECK_NOT_IMPLEMENTED(at::isFloatingType(x.scalar_type()), "norm: not implemented for ", x.scalar_type());
  const Layout layout(x);
  const int64_t batches = x.size(0), channels = x.size(1);
  if (!x.is_cpu()) {
    const at::Tensor wide = x.to(statistics_type(x.scalar_type()));
    const auto inner = static_cast<double>(std::max<int64_t>(1, layout.shape.inner));
    const Numbers mean(sum_inner(wide).div_(inner));
    const at::Tensor off = wide.sub(beside(mean, x));
    return {mean, Numbers(sum_inner(off.mul(off)))};
  }
  if (layout.shape.inner == 0) return {Numbers(batches, channels), Numbers(batches, channels)};
  const int64_t pieces = layout.pieces(), numbers = batches * channels;
  Moments parts{Numbers(pieces, numbers), Numbers(pieces, numbers)};
  double* const out_mean = parts.mean.data();
  double* const out_m2 = parts.m2.data();
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
  if (pieces > 1) {
    Numbers counts(pieces, 1);
    for (int64_t i = 0; i < pieces; ++i) counts.data()[i] = static_cast<double>(layout.piece(i).size());
    parts = merge(counts, parts);
  }
  return {parts.mean.view(batches, channels), parts.m2.view(batches, channels)};
}

std::tuple<Numbers, Numbers> dots(const at::Tensor& dy, const at::Tensor& x, const Numbers& center) {
  if (!x.is_cpu()) {
    const at::Tensor wide = dy.to(statistics_type(x.scalar_type()));
    return {Numbers(sum_inner(wide)), Numbers(sum_inner(x.sub(beside(center, x)).mul_(wide)))};
  }
  const Layout layout(x, center.rows() == 1 ? 0 : center.columns());
  const int64_t pieces = layout.pieces(), numbers = x.size(0) * x.size(1);
  Numbers sum(pieces, numbers), dot(pieces, numbers);
  double* const out_sum = sum.data();
  double* const out_dot = dot.data();
  TORCHTP_DISPATCH(x.scalar_type(), "norm_dots", [&] {
    using acc_t = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;
    const scalar_t* grads = dy.const_data_ptr<scalar_t>();
    const scalar_t* data = x.const_data_ptr<scalar_t>();
    const auto centers = center.expanded<acc_t>(center.rows(), center.columns());
    if (!layout.channels_last) {
      at::parallel_for(0, layout.units(), layout.grain(), [&](int64_t begin, int64_t end) {
        kernels::norm_dots_planes_cpu(grads, data, centers.data(), layout.shape, out_sum, out_dot, begin, end);
      });
      return;
    }
    at::parallel_for(0, layout.batches * pieces, 1, [&](int64_t begin, int64_t end) {
      for (int64_t work = begin; work < end; ++work) {
        const int64_t batch = work / pieces, at = work % pieces * numbers + batch * layout.shape.channels;
        const int64_t first = batch * layout.shape.inner * layout.shape.channels;
        const Interval rows = layout.piece(work % pieces);
        kernels::norm_dots_rows_cpu(grads + first, data + first, centers.data() + batch * layout.shape.batch_stride,
                                    layout.shape, out_sum + at, out_dot + at, rows.begin, rows.end);
      }
    });
  });
  return {sum.sum_rows().view(x.size(0), x.size(1)), dot.sum_rows().view(x.size(0), x.size(1))};
}

at::Tensor affine(const at::Tensor& x, const Numbers& center, const Numbers& scale, const Numbers& shift) {
  if (!x.is_cpu()) {
    return x.sub(beside(center, x)).mul_(beside(scale, x)).add_(beside(shift, x)).to(x.scalar_type());
  }
  const int64_t rows = common(center.rows(), common(scale.rows(), shift.rows())), columns = x.size(1);
  const Layout layout(x, rows == 1 ? 0 : columns);
  const at::Tensor y = at::empty(x.sizes(), x.options(), x.suggest_memory_format());
  TORCHTP_DISPATCH(x.scalar_type(), "norm_affine", [&] {
    using acc_t = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;
    const auto middle = center.expanded<acc_t>(rows, columns), factor = scale.expanded<acc_t>(rows, columns),
               offset = shift.expanded<acc_t>(rows, columns);
    at::parallel_for(0, layout.units(), layout.grain(), [&](int64_t begin, int64_t end) {
      kernels::norm_affine_cpu(x.const_data_ptr<scalar_t>(), y.mutable_data_ptr<scalar_t>(), middle.data(),
                               factor.data(), offset.data(), layout.shape, layout.channels_last, begin, end);
    });
  });
  return y;
}

at::Tensor combine(const at::Tensor& dy, const at::Tensor& x, const Numbers& center, const Numbers& on_dy,
                   const Numbers& on_x, const Numbers& shift) {
  const auto type = x.scalar_type();
  if (!x.is_cpu()) {
    return x.sub(beside(center, x))
        .mul_(beside(on_x, x))
        .add_(dy.mul(beside(on_dy, x)))
        .add_(beside(shift, x))
        .to(type);
  }
  const int64_t rows = common(common(center.rows(), on_dy.rows()), common(on_x.rows(), shift.rows())),
                columns = x.size(1);
  const Layout layout(x, rows == 1 ? 0 : columns);
  const at::Tensor dx = at::empty(x.sizes(), x.options(), x.suggest_memory_format());
  TORCHTP_DISPATCH(type, "norm_combine", [&] {
    using acc_t = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;
    const auto middle = center.expanded<acc_t>(rows, columns), a = on_dy.expanded<acc_t>(rows, columns),
               b = on_x.expanded<acc_t>(rows, columns), offset = shift.expanded<acc_t>(rows, columns);
    at::parallel_for(0, layout.units(), layout.grain(), [&](int64_t begin, int64_t end) {
      kernels::norm_combine_cpu(dy.const_data_ptr<scalar_t>(), x.const_data_ptr<scalar_t>(),
                                dx.mutable_data_ptr<scalar_t>(), middle.data(), a.data(), b.data(), offset.data(),
                                layout.shape, layout.channels_last, begin, end);
    });
  });
  return dx;
}

std::tuple<Moments, Numbers> merge_over(const Moments& mine, int64_t count, const std::vector<std::string>& groups) {
  const int64_t numbers = mine.mean.size();
  const Numbers message =
      Numbers::join({Numbers::filled(1, 1, static_cast<double>(count), mine.mean), mine.mean, mine.m2});
  const Numbers all(backend::all_gather(message.to_tensor(at::kDouble, {message.size()}), groups));
  const Numbers counts = all.columns(0, 1);
  return {merge(counts, {all.columns(1, numbers), all.columns(1 + numbers, numbers)}), counts.sum_rows()};
}

#undef TORCHTP_DISPATCH

}  // namespace torchtp::spatial
