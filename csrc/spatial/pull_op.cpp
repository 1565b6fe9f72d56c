// torchtp::pull and its relatives as dispatcher ops: kernels, shapes for fake tensors, autograd (each the other's).
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "backend/device_exchange_of.h"
#include "spatial/finish_pull.h"
#include "spatial/op.h"
#include "spatial/pull.h"

namespace torchtp::spatial::pull_op {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

Cut cut_of(const char* op, const at::Tensor& tensor, int64_t dim, int64_t extent, const std::string& group) {
  TORCH_CHECK_VALUE(0 <= dim && dim < tensor.dim(), op, ": dim ", dim, " is not one of 0 to ", tensor.dim() - 1,
                    ", counted from the front");
  TORCH_CHECK_VALUE(extent >= 0, op, ": extent is the global one of dim ", dim, ", not negative, got ", extent);
  return {dim, extent, backend::spatial_group(group)};
}

std::vector<Interval> intervals(const char* op, at::IntArrayRef begins, at::IntArrayRef ends, const Cut& cut) {
  TORCH_CHECK_VALUE(begins.size() == static_cast<size_t>(cut.group.size) && ends.size() == begins.size(), op,
                    ": begins and ends need one entry for each of the ", cut.group.size, " ranks, got ", begins.size(),
                    " and ", ends.size());
  std::vector<Interval> out;
  for (size_t rank = 0; rank < begins.size(); ++rank) {
    TORCH_CHECK_VALUE(begins[rank] <= ends[rank], op, ": rank ", rank, " cannot have rows [", begins[rank], ", ",
                      ends[rank], "); an empty interval ends where it begins");
    out.push_back({begins[rank], ends[rank]});
  }
  return out;
}

at::Tensor pull_kernel(const at::Tensor& input, int64_t dim, int64_t extent, at::IntArrayRef begins,
                       at::IntArrayRef ends, const std::string& group, double fill) {
  const Cut cut = cut_of("pull", input, dim, extent, group);
  const auto wanted = intervals("pull", begins, ends, cut);
  return Pulling(input, cut, wanted, wanted[cut.group.rank], fill).finish();
}

std::tuple<at::Tensor, int64_t> pull_start_kernel(const at::Tensor& input, int64_t dim, int64_t extent,
                                                  at::IntArrayRef begins, at::IntArrayRef ends,
                                                  const std::string& group, double fill) {
  const Cut cut = cut_of("pull_start", input, dim, extent, group);
  const auto wanted = intervals("pull_start", begins, ends, cut);
  const Pulling pulling(input, cut, wanted, wanted[cut.group.rank], fill);
  return {pulling.extended(), pulling.moves() ? static_cast<int64_t>(pulling.ticket()) : -1};
}

void pull_finish_kernel(const at::Tensor& extended, int64_t ticket, const std::string& group) {
  if (ticket < 0) return;
  const auto spatial_group = backend::spatial_group(group);
  if (const auto exchange = backend::device_exchange_of(spatial_group, extended.device())) {
    finish_pull_on(*exchange, extended, static_cast<uint64_t>(ticket));
  } else {
    spatial_group.exchange->finish(static_cast<uint64_t>(ticket));
  }
}

at::Tensor push_add_kernel(const at::Tensor& grad, int64_t dim, int64_t extent, at::IntArrayRef begins,
                           at::IntArrayRef ends, const std::string& group) {
  const Cut cut = cut_of("push_add", grad, dim, extent, group);
  return push_add(grad, cut, intervals("push_add", begins, ends, cut));
}

at::Tensor with_rows(const at::Tensor& like, int64_t dim, int64_t num_rows) {
  auto sizes = like.sym_sizes().vec();
  sizes[dim] = num_rows;
  return at::empty_symint(sizes, like.options(), like.suggest_memory_format());
}

at::Tensor pulled_meta(const char* op, const at::Tensor& input, int64_t dim, int64_t extent, at::IntArrayRef begins,
                       at::IntArrayRef ends, const std::string& group) {
  const Cut cut = cut_of(op, input, dim, extent, group);
  const int64_t num_rows = intervals(op, begins, ends, cut)[cut.group.rank].size();
  if (cut.group.planned) return pull_kernel(input, dim, extent, begins, ends, group, 0);
  return with_rows(input, dim, num_rows);
}

at::Tensor pull_meta(const at::Tensor& input, int64_t dim, int64_t extent, at::IntArrayRef begins, at::IntArrayRef ends,
                     const std::string& group, double) {
  return pulled_meta("pull", input, dim, extent, begins, ends, group);
}

std::tuple<at::Tensor, int64_t> pull_start_meta(const at::Tensor& input, int64_t dim, int64_t extent,
                                                at::IntArrayRef begins, at::IntArrayRef ends, const std::string& group,
                                                double) {
  return {pulled_meta("pull_start", input, dim, extent, begins, ends, group), 0};
}

void pull_finish_meta(const at::Tensor&, int64_t, const std::string&) {}

at::Tensor push_add_meta(const at::Tensor& grad, int64_t dim, int64_t extent, at::IntArrayRef begins,
                         at::IntArrayRef ends, const std::string& group) {
  const Cut cut = cut_of("push_add", grad, dim, extent, group);
  const auto wanted = intervals("push_add", begins, ends, cut);
  if (cut.group.planned) return push_add(grad, cut, wanted);
  return with_rows(grad, dim, cut.own().size());
}

// dim, extent, begins, ends, group.
using Args = std::tuple<int64_t, int64_t, Ints, Ints, std::string>;

const auto& pull_op() {
  static const auto op = typed_op("torchtp::pull", &pull_kernel);
  return op;
}

const auto& push_add_op() {
  static const auto op = typed_op("torchtp::push_add", &push_add_kernel);
  return op;
}

at::Tensor call_pull(const at::Tensor& input, const Args& args, double fill) {
  const auto& [dim, extent, begins, ends, group] = args;
  return pull_op().call(input, dim, extent, begins, ends, group, fill);
}

class PullFunction : public torch::autograd::Function<PullFunction> {
 public:
  static Variable forward(AutogradContext* ctx, const Variable& input, const Args& args, double fill) {
    at::AutoDispatchBelowADInplaceOrView below;
    save_args(ctx, args);
    return call_pull(input, args, fill);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto [args] = load_args<Args>(ctx);
    return {call_with(push_add_op(), args, grads[0]), {}, {}};
  }
};

class PushAddFunction : public torch::autograd::Function<PushAddFunction> {
 public:
  static Variable forward(AutogradContext* ctx, const Variable& grad, const Args& args) {
    at::AutoDispatchBelowADInplaceOrView below;
    save_args(ctx, args);
    return call_with(push_add_op(), args, grad);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto [args] = load_args<Args>(ctx);
    return {call_pull(grads[0], args, 0), {}};
  }
};

at::Tensor pull_autograd(const at::Tensor& input, int64_t dim, int64_t extent, at::IntArrayRef begins,
                         at::IntArrayRef ends, const std::string& group, double fill) {
  if (!needs_graph(input)) return call_below(pull_op(), input, dim, extent, begins, ends, group, fill);
  return PullFunction::apply(input, Args{dim, extent, begins.vec(), ends.vec(), group}, fill);
}

at::Tensor push_add_autograd(const at::Tensor& grad, int64_t dim, int64_t extent, at::IntArrayRef begins,
                             at::IntArrayRef ends, const std::string& group) {
  if (!needs_graph(grad)) return call_below(push_add_op(), grad, dim, extent, begins, ends, group);
  return PushAddFunction::apply(grad, Args{dim, extent, begins.vec(), ends.vec(), group});
}

void register_kernels(torch::Library& m) {
  m.impl("pull", pull_kernel);
  m.impl("push_add", push_add_kernel);
  m.impl("pull_start", pull_start_kernel);
  m.impl("pull_finish", pull_finish_kernel);
}

}  // namespace

TORCH_LIBRARY_IMPL(torchtp, CPU, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(torchtp, CUDA, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(torchtp, Meta, m) {
  m.impl("pull", pull_meta);
  m.impl("push_add", push_add_meta);
  m.impl("pull_start", pull_start_meta);
  m.impl("pull_finish", pull_finish_meta);
}
TORCH_LIBRARY_IMPL(torchtp, Autograd, m) {
  m.impl("pull", pull_autograd);
  m.impl("push_add", push_add_autograd);
}

}  // namespace torchtp::spatial::pull_op
