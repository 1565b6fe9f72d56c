#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros_like.h>

#include "backend/reduce.h"
#include "spatial/norm.h"

namespace torchtp::spatial {

// With q = w dy, h = (x - mean) invstd and the projection P(v) = v - mean(v) - h mean(v h), dx = invstd P(q). P is its
// own adjoint, and h varies by invstd P(change of x). u, v_w, v_b are the cotangents of dx, dw, db and r = v_w dy:
//   for dy: w invstd P(u) + v_w h + v_b
//   for w:  dy invstd P(u)
//   for x:  invstd P(r) - invstd^2 (mean(u h) P(q) + mean(q h) P(u) + h mean(u P(q)))
// where mean(u P(q)) = mean(u q) - mean(u) mean(q) - mean(u h) mean(q h). All means are of the whole tensor.
std::array<at::Tensor, 3> norm_double_backward(const std::array<at::Tensor, 3>& cotangents, const at::Tensor& dy,
                                               const at::Tensor& x, const at::Tensor& weight, const at::Tensor& mean,
                                               const at::Tensor& invstd, at::IntArrayRef dims, bool constant,
                                               const std::vector<std::string>& groups) {
  const at::Tensor h = x.sub(mean).mul_(invstd);
  const at::Tensor u = cotangents[0].defined() ? cotangents[0] : at::zeros_like(x);
  const at::Tensor q = weight.defined() ? dy.mul(weight) : dy;
  const at::Tensor r = cotangents[1].defined() ? dy.mul(cotangents[1]) : at::zeros_like(x);
  at::Tensor Pu = u, for_x;
  if (constant) {
    for_x = r.mul(invstd);
  } else {
    const auto sum = [&](const at::Tensor& tensor) { return at::sum(tensor, dims, true, at::kDouble).unsqueeze(0); };
    int64_t count = 1;
    for (const int64_t dim : dims) count *= x.size(dim);
    at::Tensor sums = at::cat({sum(u), sum(q), sum(r), sum(u.mul(h)), sum(q.mul(h)), sum(r.mul(h)), sum(u.mul(q))});
    const at::Tensor counted = at::cat({sums.reshape({-1}), at::full({1}, static_cast<double>(count), sums.options())});
    backend::all_reduce(counted, groups);
    const int64_t numbers = sums.numel();
    sums = counted.narrow(0, 0, numbers).div(counted.narrow(0, numbers, 1)).view(sums.sizes()).to(x.scalar_type());
    const auto project = [&](const at::Tensor& v, int64_t at) { return v.sub(sums[at]).sub_(h.mul(sums[at + 3])); };
    Pu = project(u, 0);
    const at::Tensor inner = sums[6].sub(sums[0].mul(sums[1])).sub_(sums[3].mul(sums[4]));
    const at::Tensor mixed = project(q, 1).mul_(sums[3]).add_(Pu.mul(sums[4])).add_(h.mul(inner));
    for_x = project(r, 2).mul_(invstd).sub_(mixed.mul_(invstd.mul(invstd)));
  }
  at::Tensor for_q = Pu.mul(invstd);
  at::Tensor for_dy = weight.defined() ? for_q.mul(weight) : for_q;
  if (cotangents[1].defined()) for_dy = for_dy.add(h.mul(cotangents[1]));
  if (cotangents[2].defined()) for_dy = for_dy.add(cotangents[2]);
  return {for_dy, for_x, for_q.mul(dy)};
}

}  // namespace torchtp::spatial
