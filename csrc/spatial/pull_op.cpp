// torchtp::pull and its relatives as dispatcher ops: kernels, shapes for fake tensors, autograd (each the other's).
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "spatial/pull.h"

namespace torchtp::spatial {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

Cut cut_of(int64_t dim, int64_t extent, const std::string& group) {
  return {dim, extent, backend::spatial_group(group)};
}

std::vector<Interval> intervals(at::IntArrayRef begins, at::IntArrayRef ends, const Cut& cut) {
  TORCH_CHECK_VALUE(begins.size() == static_cast<size_t>(cut.group.size) && ends.size() == begins.size(),
                    "pull: begins and ends need one entry for each of the ", cut.group.size, " ranks, got ",
                    begins.size(), " and ", ends.size());
  std::vector<Interval> out;
  for (size_t rank = 0; rank < begins.size(); ++rank) out.push_back({begins[rank], std::max(begins[rank], ends[rank])});
  return out;
}

at::Tensor pull_kernel(const at::Tensor& input, int64_t dim, int64_t extent, at::IntArrayRef begins,
                       at::IntArrayRef ends, const std::string& group, double fill) {
  const Cut cut = cut_of(dim, extent, group);
  const auto wanted = intervals(begins, ends, cut);
  return Pulling(input, cut, wanted, wanted[cut.group.rank], fill).finish();
}

std::tuple<at::Tensor, int64_t> pull_start_kernel(const at::Tensor& input, int64_t dim, int64_t extent,
                                                  at::IntArrayRef begins, at::IntArrayRef ends,
                                                  const std::string& group, double fill) {
  const Cut cut = cut_of(dim, extent, group);
  const auto wanted = intervals(begins, ends, cut);
  const Pulling pulling(input, cut, wanted, wanted[cut.group.rank], fill);
  return {pulling.extended(), pulling.moves() ? static_cast<int64_t>(pulling.ticket()) : -1};
}

void pull_finish_kernel(const at::Tensor&, int64_t ticket, const std::string& group) {
  if (ticket >= 0) backend::spatial_group(group).exchange->finish(static_cast<uint64_t>(ticket));
}

at::Tensor push_add_kernel(const at::Tensor& grad, int64_t dim, int64_t extent, at::IntArrayRef begins,
                           at::IntArrayRef ends, const std::string& group) {
  const Cut cut = cut_of(dim, extent, group);
  return push_add(grad, cut, intervals(begins, ends, cut));
}

at::Tensor with_rows(const at::Tensor& like, int64_t dim, int64_t num_rows) {
  auto sizes = like.sym_sizes().vec();
  sizes[dim] = num_rows;
  return at::empty_symint(sizes, like.options(), like.suggest_memory_format());
}

at::Tensor pull_meta(const at::Tensor& input, int64_t dim, int64_t extent, at::IntArrayRef begins, at::IntArrayRef ends,
                     const std::string& group, double) {
  const Cut cut = cut_of(dim, extent, group);
  return with_rows(input, dim, intervals(begins, ends, cut)[cut.group.rank].size());
}

std::tuple<at::Tensor, int64_t> pull_start_meta(const at::Tensor& input, int64_t dim, int64_t extent,
                                                at::IntArrayRef begins, at::IntArrayRef ends, const std::string& group,
                                                double fill) {
  return {pull_meta(input, dim, extent, begins, ends, group, fill), 0};
}

void pull_finish_meta(const at::Tensor&, int64_t, const std::string&) {}

at::Tensor push_add_meta(const at::Tensor& grad, int64_t dim, int64_t extent, at::IntArrayRef begins,
                         at::IntArrayRef ends, const std::string& group) {
  const Cut cut = cut_of(dim, extent, group);
  intervals(begins, ends, cut);
  return with_rows(grad, dim, cut.own().size());
}

at::Tensor call_pull(const at::Tensor& input, int64_t dim, int64_t extent, at::IntArrayRef begins, at::IntArrayRef ends,
                     const std::string& group, double fill) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("torchtp::pull", "")
                             .typed<at::Tensor(const at::Tensor&, int64_t, int64_t, at::IntArrayRef, at::IntArrayRef,
                                               const std::string&, double)>();
  return op.call(input, dim, extent, begins, ends, group, fill);
}

at::Tensor call_push_add(const at::Tensor& grad, int64_t dim, int64_t extent, at::IntArrayRef begins,
                         at::IntArrayRef ends, const std::string& group) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("torchtp::push_add", "")
                             .typed<at::Tensor(const at::Tensor&, int64_t, int64_t, at::IntArrayRef, at::IntArrayRef,
                                               const std::string&)>();
  return op.call(grad, dim, extent, begins, ends, group);
}

struct PullArgs {
  int64_t dim, extent;
  std::vector<int64_t> begins, ends;
  std::string group;

  void save(AutogradContext* ctx) const {
    ctx->saved_data["dim"] = dim;
    ctx->saved_data["extent"] = extent;
    ctx->saved_data["begins"] = begins;
    ctx->saved_data["ends"] = ends;
    ctx->saved_data["group"] = group;
  }
  static PullArgs load(AutogradContext* ctx) {
    return {ctx->saved_data["dim"].toInt(), ctx->saved_data["extent"].toInt(), ctx->saved_data["begins"].toIntVector(),
            ctx->saved_data["ends"].toIntVector(), ctx->saved_data["group"].toStringRef()};
  }
};

class PullFunction : public torch::autograd::Function<PullFunction> {
 public:
  static Variable forward(AutogradContext* ctx, const Variable& input, const PullArgs& args, double fill) {
    args.save(ctx);
    at::AutoDispatchBelowADInplaceOrView below;
    return call_pull(input, args.dim, args.extent, args.begins, args.ends, args.group, fill);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const PullArgs args = PullArgs::load(ctx);
    return {call_push_add(grads[0], args.dim, args.extent, args.begins, args.ends, args.group), {}, {}};
  }
};

class PushAddFunction : public torch::autograd::Function<PushAddFunction> {
 public:
  static Variable forward(AutogradContext* ctx, const Variable& grad, const PullArgs& args) {
    args.save(ctx);
    at::AutoDispatchBelowADInplaceOrView below;
    return call_push_add(grad, args.dim, args.extent, args.begins, args.ends, args.group);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const PullArgs args = PullArgs::load(ctx);
    return {call_pull(grads[0], args.dim, args.extent, args.begins, args.ends, args.group, 0), {}};
  }
};

at::Tensor pull_autograd(const at::Tensor& input, int64_t dim, int64_t extent, at::IntArrayRef begins,
                         at::IntArrayRef ends, const std::string& group, double fill) {
  return PullFunction::apply(input, PullArgs{dim, extent, begins.vec(), ends.vec(), group}, fill);
}

at::Tensor push_add_autograd(const at::Tensor& grad, int64_t dim, int64_t extent, at::IntArrayRef begins,
                             at::IntArrayRef ends, const std::string& group) {
  return PushAddFunction::apply(grad, PullArgs{dim, extent, begins.vec(), ends.vec(), group});
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

}  // namespace torchtp::spatial
