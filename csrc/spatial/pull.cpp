#include "spatial/pull.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <cstdlib>

#include "backend/device_exchange_of.h"
#include "core/error.h"
#include "spatial/device_slab.h"
#include "spatial/finish_pull.h"
#include "spatial/slab.h"
#include "spatial/stream.h"

namespace torchtp::spatial {
namespace {

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
  TORCH_CHECK_VALUE(tensor.size(cut.dim) == rows, op, ": dim ", cut.dim, " of global extent ", cut.extent, " over ",
                    cut.group.size, " ranks gives rank ", cut.group.rank, " ", rows, " rows, but it has ",
                    tensor.size(cut.dim));
}

// The parts as messages of rows of the tensor, whose first row is `first`. On the host they tell the extent as well.
template <typename Make, typename... Extent>
auto collect(const Parts& parts, const Make& make, const at::Tensor& tensor, const Cut& cut, int64_t first,
             Extent... extent) {
  std::vector<decltype(make(tensor, cut.dim, Interval{}, 0, extent...))> messages;
  messages.reserve(parts.size());
  for (const PullPlan::Part& part : parts) {
    messages.push_back(make(tensor, cut.dim, shift(part.rows, first), part.peer, extent...));
  }
  return messages;
}

// The exchange of a pull under way on a device: finishing is all that is left of it.
class FinishOnDevice final : public exchange::Exchange {
 public:
  FinishOnDevice(std::shared_ptr<exchange::DeviceExchange> exchange, at::Tensor extended)
      : exchange_(std::move(exchange)), extended_(std::move(extended)) {}
  int rank() const override { return exchange_->rank(); }
  int size() const override { return exchange_->size(); }
  uint64_t start(std::vector<exchange::Send>, std::vector<exchange::Receive>) override {
    throw Error("a pull under way starts nothing");
  }
  void finish(uint64_t ticket) override { finish_pull_on(*exchange_, extended_, ticket); }

 private:
  std::shared_ptr<exchange::DeviceExchange> exchange_;
  at::Tensor extended_;
};

}  // namespace

void finish_pull_on(exchange::DeviceExchange& exchange, const at::Tensor& extended, uint64_t ticket) {
  const OnStream here(extended);
  used_here(extended);
  exchange.finish(ticket, here.stream());
}

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

  const OnStream here(source);
  // Every rank takes part when any rank moves something, so that tickets agree.
  moves_ = plan.anyone_moves;
  const auto device_exchange = moves_ ? backend::device_exchange_of(cut.group, source.device()) : nullptr;
  if (device_exchange) {
    ticket_ = device_exchange->start(collect(plan.sends, send_slab, source, cut, plan.own.begin),
                                     collect(plan.receives, receive_slab, extended_, cut, frame.begin), here.stream());
    exchange_ = std::make_shared<FinishOnDevice>(device_exchange, extended_);
  } else if (moves_) {
    ticket_ = exchange_->start(collect(plan.sends, send_rows, source, cut, plan.own.begin, cut.extent),
                               collect(plan.receives, receive_rows, extended_, cut, frame.begin, cut.extent));
  }

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
  const OnStream here(source);
  const auto device_exchange = plan->anyone_moves ? backend::device_exchange_of(cut.group, source.device()) : nullptr;
  uint64_t ticket = 0;
  if (device_exchange) {  // writes nothing before finish()
    ticket = device_exchange->start(collect(plan->receives, send_slab, source, cut, frame.begin),
                                    collect(plan->sends, add_slab, out, cut, plan->own.begin), here.stream());
  }
  const Interval kept = plan->kept.empty() ? Interval{} : shift(plan->kept, plan->own.begin);
  lay_rows(source, shift(plan->kept, frame.begin), out, kept.begin, {0, kept.begin}, {kept.end, plan->own.size()},
           cut.dim, 0);
  if (device_exchange) {
    device_exchange->finish(ticket, here.stream());
  } else if (plan->anyone_moves) {
    cut.group.exchange->finish(
        cut.group.exchange->start(collect(plan->receives, send_rows, source, cut, frame.begin, cut.extent),
                                  collect(plan->sends, add_rows, out, cut, plan->own.begin, cut.extent)));
  }
  return out;
}

}  // namespace torchtp::spatial
