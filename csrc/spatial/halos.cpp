#include "spatial/halos.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <tuple>
#include <utility>

#include "backend/device_exchange_of.h"
#include "spatial/device_slab.h"
#include "spatial/slab.h"
#include "spatial/stream.h"

namespace torchtp::spatial {
namespace {

std::vector<at::Tensor> defined(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> out;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined()) out.push_back(tensor);
  }
  TORCH_CHECK(!out.empty(), "halos: there is no tensor to take own rows from");
  return out;
}

std::vector<int64_t> sizes_with(const at::Tensor& like, int64_t stacked_dim, int64_t along_stack, int64_t dim,
                                int64_t rows) {
  std::vector<int64_t> sizes = like.sizes().vec();
  sizes[stacked_dim] = along_stack;
  sizes[dim] = rows;
  return sizes;
}

at::Tensor make_rows(const at::Tensor& like, const std::vector<int64_t>& sizes, bool zero) {
  at::Tensor rows = at::empty(sizes, like.options(), like.suggest_memory_format());
  return zero ? rows.zero_() : rows;
}

// Contiguous in the layout of `like`.
std::vector<int64_t> strides_of(const std::vector<int64_t>& sizes, at::MemoryFormat format) {
  const auto dims = static_cast<int64_t>(sizes.size());
  std::vector<int64_t> order(dims), strides(dims);
  for (int64_t dim = 0; dim < dims; ++dim) order[dim] = dim;
  if (format != at::MemoryFormat::Contiguous) std::rotate(order.begin() + 1, order.begin() + 2, order.end());
  int64_t stride = 1;
  for (auto dim = order.rbegin(); dim != order.rend(); ++dim) {
    strides[*dim] = stride;
    stride *= std::max<int64_t>(sizes[*dim], 1);
  }
  return strides;
}

}  // namespace

std::pair<Interval, Interval> beside(const PullPlan& plan) {
  if (plan.wanted.empty()) return {};
  return {{std::min(plan.wanted.begin, plan.own.begin), plan.own.begin},
          {plan.own.end, std::max(plan.wanted.end, plan.own.end)}};
}

Halos::Halos(const at::Tensor& own, const Cut& cut, const std::vector<Interval>& wanted)
    : Halos({own}, cut.dim == 0 ? 1 : 0, cut, wanted) {}

Halos::Halos(const std::vector<at::Tensor>& tensors, int64_t stacked_dim, const Cut& cut,
             const std::vector<Interval>& wanted)
    : exchange_(cut.group.exchange) {
  const std::vector<at::Tensor> stacked = defined(tensors);
  const auto plan = cut.group.plans->get(cut.extent, cut.group.rank, wanted);
  like_ = stacked.front();
  int64_t along_stack = 0;
  for (const at::Tensor& tensor : stacked) {
    TORCH_CHECK_VALUE(tensor.size(cut.dim) == plan->own.size(), "halos: dim ", cut.dim, " of global extent ",
                      cut.extent, " over ", cut.group.size, " ranks gives rank ", cut.group.rank, " ", plan->own.size(),
                      " rows, but it has ", tensor.size(cut.dim));
    along_stack += tensor.size(stacked_dim);
    if (!tensor.is_contiguous()) like_ = tensor;  // of one row or channel a tensor may be in either layout
  }
  std::tie(before_.rows, after_.rows) = beside(*plan);
  if (plan->anyone_moves) device_exchange_ = backend::device_exchange_of(cut.group, like_.device());
  // Whether some piece with so many rows is in one layout only: else the rank sends, or expects, either.
  const auto tells_layout = [&](int64_t rows) {
    return std::any_of(stacked.begin(), stacked.end(), [&](const at::Tensor& piece) {
      return leave_slab(piece, cut.dim, rows, cut.dim, rows, 0).layout.matters();
    });
  };
  // A message that brings all rows of a side can stay where it arrives.
  for (size_t message = 0; device_exchange_ && message < plan->receives.size(); ++message) {
    const PullPlan::Part& part = plan->receives[message];
    Side& side = side_of(part);
    if (part.rows != side.rows) continue;
    const auto left = leave_slab(like_, cut.dim, side.rows.size(), stacked_dim, along_stack, part.peer);
    if (left.num_bytes == 0 || left.num_bytes > device_exchange_->largest_left()) continue;
    const int64_t theirs = owned(cut.extent, cut.group.size, part.peer).size();
    if (left.layout.matters() && !(tells_layout(plan->own.size()) && tells_layout(theirs))) continue;
    side.message = static_cast<int>(message);
  }
  for (Side* side : {&before_, &after_}) {
    if (side->message >= 0) continue;
    const auto sizes = sizes_with(like_, stacked_dim, along_stack, cut.dim, side->rows.size());
    side->tensor = make_rows(like_, sizes, !plan->wanted.contains(side->rows));
  }
  if (!plan->anyone_moves) return;
  if (device_exchange_) {
    start_on_device(stacked, stacked_dim, cut, *plan);
  } else {
    start_on_host(stacked, stacked_dim, cut, *plan);
  }
  state_ = State::kUnderWay;
  for (Side* side : {&before_, &after_}) {
    if (side->message < 0) continue;
    side->sizes = sizes_with(like_, stacked_dim, along_stack, cut.dim, side->rows.size());
  }
}

Halos::~Halos() {
  try {
    release();
  } catch (const std::exception& error) {
    TORCH_WARN("halos: ", error.what());
  }
}

void Halos::start_on_host(const std::vector<at::Tensor>& stacked, int64_t stacked_dim, const Cut& cut,
                          const PullPlan& plan) {
  std::vector<exchange::Send> sends;
  for (const PullPlan::Part& part : plan.sends) {
    const Interval rows = shift(part.rows, plan.own.begin);
    if (stacked.size() == 1) {
      sends.push_back(send_rows(like_, cut.dim, rows, part.peer, cut.extent));
      continue;
    }
    std::vector<at::Tensor> parts;
    for (const at::Tensor& tensor : stacked) parts.push_back(tensor.narrow(cut.dim, rows.begin, rows.size()));
    const at::Tensor slab = at::cat(parts, stacked_dim).contiguous(like_.suggest_memory_format());
    sends.push_back(send_rows(slab, cut.dim, {0, rows.size()}, part.peer, cut.extent));
  }
  std::vector<exchange::Receive> receives;
  for (const PullPlan::Part& part : plan.receives) {
    const Side& side = side_of(part);
    receives.push_back(receive_rows(side.tensor, cut.dim, shift(part.rows, side.rows.begin), part.peer, cut.extent));
  }
  ticket_ = exchange_->start(std::move(sends), std::move(receives));
}

void Halos::start_on_device(const std::vector<at::Tensor>& stacked, int64_t stacked_dim, const Cut& cut,
                            const PullPlan& plan) {
  const OnStream here(like_);
  std::vector<exchange::DeviceSend> sends;
  for (const PullPlan::Part& part : plan.sends) {
    sends.push_back(send_stacked(stacked, stacked_dim, cut.dim, shift(part.rows, plan.own.begin), part.peer));
  }
  int64_t along_stack = 0;
  for (const at::Tensor& tensor : stacked) along_stack += tensor.size(stacked_dim);
  std::vector<exchange::DeviceReceive> receives;
  for (size_t message = 0; message < plan.receives.size(); ++message) {
    const PullPlan::Part& part = plan.receives[message];
    const Side& side = side_of(part);
    receives.push_back(side.message == static_cast<int>(message)
                           ? leave_slab(like_, cut.dim, part.rows.size(), stacked_dim, along_stack, part.peer)
                           : receive_slab(side.tensor, cut.dim, shift(part.rows, side.rows.begin), part.peer));
  }
  ticket_ = device_exchange_->start(std::move(sends), std::move(receives), here.stream());
}

void Halos::wait() {
  if (state_ != State::kUnderWay) return;
  state_ = State::kNothing;
  if (!device_exchange_) return exchange_->finish(ticket_);
  const OnStream here(like_);
  const auto left = device_exchange_->finish(ticket_, here.stream());
  for (Side* side : {&before_, &after_}) {
    if (side->message < 0) continue;
    state_ = State::kHeld;
    const auto strides = strides_of(side->sizes, like_.suggest_memory_format());
    side->tensor = at::for_blob(const_cast<std::byte*>(left[side->message]), side->sizes)
                       .strides(strides)
                       .options(like_.options())
                       .target_device(like_.device())
                       .make_tensor();
  }
}

void Halos::release() {
  wait();
  if (std::exchange(state_, State::kNothing) != State::kHeld) return;
  const OnStream here(like_);
  device_exchange_->release(ticket_, here.stream());
}

}  // namespace torchtp::spatial
