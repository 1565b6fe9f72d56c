#include "backend/grouped_exchange.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <map>

#include "exchange/payload_memory.h"

namespace torchtp::backend {

using exchange::DeviceReceive;
using exchange::DeviceSend;
using exchange::PayloadMemory;
using exchange::Stream;

struct GroupedExchange::Exchanging {
  // What goes to or comes from one peer.
  struct Flow {
    int peer;
    std::vector<size_t> messages;
    PayloadMemory memory;
  };
  uint64_t ticket;
  Stream stream;  // that the memory was allocated for
  std::vector<DeviceReceive> receives;
  std::vector<Flow> out, in;
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
};

namespace {

template <typename Message>
std::map<int, std::vector<size_t>> messages_by_peer(const std::vector<Message>& messages) {
  std::map<int, std::vector<size_t>> out;
  for (size_t i = 0; i < messages.size(); ++i) out[messages[i].peer].push_back(i);
  return out;
}

template <typename Message>
std::vector<int64_t> sizes_of(const std::vector<Message>& messages, const std::vector<size_t>& indices) {
  std::vector<int64_t> sizes;
  for (const size_t index : indices) sizes.push_back(messages[index].num_bytes);
  return sizes;
}

std::vector<at::Tensor> as_tensors(const PayloadMemory& memory, c10::Device device) {
  return {at::from_blob(memory.data(), {static_cast<int64_t>(memory.num_bytes())},
                        at::TensorOptions().dtype(at::kByte).device(device))};
}

constexpr int kTag = 0x7470;

}  // namespace

GroupedExchange::GroupedExchange(const c10::intrusive_ptr<c10d::ProcessGroup>& group, c10::Device device,
                                 std::shared_ptr<exchange::HaloDevice> kernels)
    : group_(group), device_(device), kernels_(std::move(kernels)), rank_(group->getRank()), size_(group->getSize()) {}

uint64_t GroupedExchange::start(std::vector<DeviceSend> sends, std::vector<DeviceReceive> receives, Stream stream) {
  const auto group = group_.lock();
  if (!group) throw Error("exchange: the process group has been destroyed");
  const std::lock_guard<std::mutex> lock(mutex_);
  auto exchanging = std::make_shared<Exchanging>();
  exchanging->ticket = under_way_.next();
  exchanging->stream = stream;
  kernels_->enter(stream);
  for (auto& [peer, indices] : messages_by_peer(sends)) {
    PayloadMemory memory(*kernels_, sizes_of(sends, indices));
    std::vector<const DeviceSend*> messages;
    for (const size_t index : indices) messages.push_back(&sends[index]);
    memory.pack(*kernels_, messages, exchanging->ticket, stream);
    exchanging->out.push_back({peer, std::move(indices), std::move(memory)});
  }
  for (auto& [peer, indices] : messages_by_peer(receives)) {
    PayloadMemory memory(*kernels_, sizes_of(receives, indices));
    exchanging->in.push_back({peer, std::move(indices), std::move(memory)});
  }
  exchanging->receives = std::move(receives);
  // A backend that groups makes one work of all; another one answers each call.
  const bool groups = group->getBackend(device_.type())->supportsCoalescing();
  auto& works = exchanging->works;
  const bool any = !exchanging->out.empty() || !exchanging->in.empty();
  if (groups && any) group->startCoalescing(device_.type());
  for (const auto& flow : exchanging->in) {
    auto tensors = as_tensors(flow.memory, device_);
    works.push_back(group->recv(tensors, flow.peer, kTag));
  }
  for (const auto& flow : exchanging->out) {
    auto tensors = as_tensors(flow.memory, device_);
    works.push_back(group->send(tensors, flow.peer, kTag));
  }
  if (groups && any) {
    if (auto work = group->endCoalescing(device_.type())) works = {std::move(work)};
  }
  under_way_.put(exchanging->ticket, exchanging);
  return exchanging->ticket;
}

std::vector<const std::byte*> GroupedExchange::finish(uint64_t ticket, Stream stream) {
  const std::shared_ptr<Exchanging> exchanging = under_way_.take(ticket);
  for (const auto& work : exchanging->works) {
    if (work) work->wait();
  }
  exchanging->works.clear();
  const std::lock_guard<std::mutex> lock(mutex_);
  kernels_->enter(stream);
  exchange::PayloadTaker taker(*kernels_, {}, stream);
  for (const auto& flow : exchanging->in) {
    for (size_t message = 0; message < flow.messages.size(); ++message) {
      const size_t index = flow.messages[message];
      const DeviceReceive& receive = exchanging->receives[index];
      taker.take(receive, flow.memory.place(message), 0, receive.num_bytes);
    }
  }
  taker.launch();
  kernels_->enter(exchanging->stream);  // before the memory goes back to it
  return std::vector<const std::byte*>(exchanging->receives.size());
}

}  // namespace torchtp::backend
