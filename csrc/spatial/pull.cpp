#include "spatial/pull.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <cstdlib>

#include "spatial/slab.h"

namespace torchtp::spatial {
namespace {

Interval shift(const Interval& interval, int64_t by) { return {interval.begin - by, interval.end - by}; }

using Parts = std::vector<PullPlan::Part>;

// One exchange, in which `sends` are rows of `source`.
void count(const Cut& cut, const at::Tensor& source, const Parts& sends, const Parts& receives) {
  backend::Traffic& traffic = *cut.group.traffic;
  bool beyond = false;
  for (const PullPlan::Part& part : sends) {
    traffic.num_bytes += part.rows.size() * (source.numel() / source.size(cut.dim)) * source.element_size();
    beyond |= std::abs(part.peer - cut.group.rank) > 1;
  }
  for (const PullPlan::Part& part : receives) beyond |= std::abs(part.peer - cut.group.rank) > 1;
  traffic.num_exchanges += 1;
  traffic.num_beyond_neighbours += beyond;
}

void check_shard(const char* op, const at::Tensor& tensor, const Cut& cut, int64_t rows) {
  TORCH_CHECK(tensor.device().is_cpu() || tensor.is_meta(), op, ": halos of ", tensor.device(),
              " tensors have no transport in this build; move the model to the CPU");
  TORCH_CHECK_VALUE(tensor.size(cut.dim) == rows, op, ": dim ", cut.dim, " of global extent ", cut.extent, " over ",
                    cut.group.size, " ranks gives rank ", cut.group.rank, " ", rows, " rows, but it has ",
                    tensor.size(cut.dim));
}

}  // namespace

Pulling::Pulling(const at::Tensor& input, const Cut& cut, const std::vector<Interval>& wanted, const Interval& frame,
                 double fill)
    : Pulling(input, cut, *cut.group.plans->get(cut.extent, cut.group.rank, wanted), frame, fill) {}

Pulling::Pulling(const at::Tensor& input, const Cut& cut, const PullPlan& plan, const Interval& frame, double fill)
    : exchange_(cut.group.exchange) {
  check_shard("pull", input, cut, plan.own.size());
  const at::Tensor source = dense(input);
  std::vector<int64_t> sizes = source.sizes().vec();
  sizes[cut.dim] = frame.size();
  extended_ = at::empty(sizes, source.options(), source.suggest_memory_format());
  if (plan.anyone_moves) count(cut, source, plan.sends, plan.receives);
  if (input.is_meta()) return;

  std::vector<exchange::Send> sends;
  for (const PullPlan::Part& part : plan.sends) {
    sends.push_back(send_rows(source, cut.dim, shift(part.rows, plan.own.begin), part.peer));
  }
  std::vector<exchange::Receive> receives;
  for (const PullPlan::Part& part : plan.receives) {
    receives.push_back(receive_rows(extended_, cut.dim, shift(part.rows, frame.begin), part.peer));
  }
  // Every rank takes part when any rank moves something, so that tickets agree.
  moves_ = plan.anyone_moves;
  if (moves_) ticket_ = exchange_->start(std::move(sends), std::move(receives));

  Interval before{0, frame.size()}, after{};
  if (!plan.wanted.empty()) {
    before = {0, plan.wanted.begin - frame.begin};
    after = {plan.wanted.end - frame.begin, frame.size()};
  }
  lay_rows(source, shift(plan.kept, plan.own.begin), extended_, plan.kept.begin - frame.begin, before, after, cut.dim,
           fill);
}

at::Tensor Pulling::finish() {
  if (moves_) exchange_->finish(ticket_);
  return extended_;
}

at::Tensor pull(const at::Tensor& input, const Cut& cut, const std::vector<Interval>& wanted, const Interval& frame,
                double fill) {
  const auto plan = cut.group.plans->get(cut.extent, cut.group.rank, wanted);
  if (!plan->anyone_moves && plan->own == plan->wanted && frame == plan->own) {
    check_shard("pull", input, cut, plan->own.size());
    return input;
  }
  return Pulling(input, cut, *plan, frame, fill).finish();
}

at::Tensor push_add(const at::Tensor& grad, const Cut& cut, const std::vector<Interval>& wanted) {
  const auto plan = cut.group.plans->get(cut.extent, cut.group.rank, wanted);
  const Interval& frame = wanted[cut.group.rank];
  check_shard("push_add", grad, cut, frame.size());
  const at::Tensor source = dense(grad);
  std::vector<int64_t> sizes = source.sizes().vec();
  sizes[cut.dim] = plan->own.size();
  const at::Tensor out = at::empty(sizes, source.options(), source.suggest_memory_format());
  if (plan->anyone_moves) count(cut, source, plan->receives, plan->sends);
  if (grad.is_meta()) return out;
  const Interval kept = plan->kept.empty() ? Interval{} : shift(plan->kept, plan->own.begin);
  lay_rows(source, shift(plan->kept, frame.begin), out, kept.begin, {0, kept.begin}, {kept.end, plan->own.size()},
           cut.dim, 0);
  if (!plan->anyone_moves) return out;
  std::vector<exchange::Send> sends;
  for (const PullPlan::Part& part : plan->receives) {
    sends.push_back(send_rows(source, cut.dim, shift(part.rows, frame.begin), part.peer));
  }
  std::vector<exchange::Receive> receives;
  for (const PullPlan::Part& part : plan->sends) {
    receives.push_back(add_rows(out, cut.dim, shift(part.rows, plan->own.begin), part.peer));
  }
  cut.group.exchange->finish(cut.group.exchange->start(std::move(sends), std::move(receives)));
  return out;
}

}  // namespace torchtp::spatial
