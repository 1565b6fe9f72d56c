#include "spatial/pull.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include "spatial/slab.h"

namespace torchtp::spatial {
namespace {

Interval shift(const Interval& interval, int64_t by) { return {interval.begin - by, interval.end - by}; }

uint64_t start(const Cut& cut, std::vector<exchange::Send> sends, std::vector<exchange::Receive> receives) {
  for (const exchange::Send& send : sends) cut.group.traffic->num_bytes += send.num_bytes;
  return cut.group.exchange->start(std::move(sends), std::move(receives));
}

void check_shard(const char* op, const at::Tensor& tensor, const Cut& cut, int64_t rows) {
  TORCH_CHECK(tensor.device().is_cpu(), op, ": halos of ", tensor.device(),
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

  std::vector<exchange::Send> sends;
  for (const PullPlan::Part& part : plan.sends) {
    sends.push_back(send_rows(source, cut.dim, shift(part.rows, plan.own.begin), part.peer));
  }
  std::vector<int64_t> sizes = source.sizes().vec();
  sizes[cut.dim] = frame.size();
  extended_ = at::empty(sizes, source.options(), source.suggest_memory_format());
  std::vector<exchange::Receive> receives;
  for (const PullPlan::Part& part : plan.receives) {
    receives.push_back(receive_rows(extended_, cut.dim, shift(part.rows, frame.begin), part.peer));
  }
  // Every rank takes part when any rank moves something, so that tickets agree.
  moves_ = plan.anyone_moves;
  if (moves_) ticket_ = start(cut, std::move(sends), std::move(receives));

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
  cut.group.exchange->finish(start(cut, std::move(sends), std::move(receives)));
  return out;
}

}  // namespace torchtp::spatial
