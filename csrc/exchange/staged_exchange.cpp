#include "exchange/staged_exchange.h"

#include <cstring>

#include "exchange/payload_memory.h"

namespace torchtp::exchange {

// A header and a payload in memory of the host.
class StagedExchange::HostMemory final : public Source, public Sink {
 public:
  explicit HostMemory(size_t num_bytes) : bytes_(sizeof(kernels::HaloHeader) + num_bytes) {}

  std::byte* data() { return bytes_.data(); }
  size_t num_bytes() const { return bytes_.size(); }
  std::byte* payload() { return bytes_.data() + sizeof(kernels::HaloHeader); }
  void read(size_t offset, std::byte* out, size_t num_bytes) const override {
    std::memcpy(out, bytes_.data() + sizeof(kernels::HaloHeader) + offset, num_bytes);
  }
  void write(uint32_t layout, size_t offset, const std::byte* in, size_t num_bytes) override {
    kernels::HaloHeader header;
    header.layout = layout;
    std::memcpy(bytes_.data(), &header, sizeof(header));
    std::memcpy(payload() + offset, in, num_bytes);
  }

 private:
  std::vector<std::byte> bytes_;
};

struct StagedExchange::Exchanging {
  uint64_t host_ticket;
  std::vector<DeviceReceive> receives;
  std::vector<std::shared_ptr<HostMemory>> arriving;  // [receives]
};

std::shared_ptr<Exchange> StagedExchange::host() const {
  auto exchange = host_.lock();
  if (!exchange) throw Error("exchange: the process group has been destroyed");
  return exchange;
}

uint64_t StagedExchange::start(std::vector<DeviceSend> sends, std::vector<DeviceReceive> receives, Stream stream) {
  if (device_->graph_of(stream) != 0) {
    throw Error(
        "halos that pass the host cannot be captured in a graph: give the group a CUDA backend (nccl), or devices that "
        "see each other's memory");
  }
  device_->enter(stream);
  std::vector<Send> out;
  for (const DeviceSend& send : sends) {
    const PayloadMemory packed(*device_, {send.num_bytes});
    packed.pack(*device_, {&send}, 0, stream);
    const auto memory = std::make_shared<HostMemory>(static_cast<size_t>(send.num_bytes));
    device_->read(memory->data(), packed.data(), memory->num_bytes(), stream);
    out.push_back({send.peer, send.layout, static_cast<size_t>(send.num_bytes), memory});
  }
  auto exchanging = std::make_shared<Exchanging>();
  std::vector<Receive> in;
  for (const DeviceReceive& receive : receives) {
    exchanging->arriving.push_back(std::make_shared<HostMemory>(static_cast<size_t>(receive.num_bytes)));
    in.push_back({receive.peer, static_cast<size_t>(receive.num_bytes), exchanging->arriving.back()});
  }
  exchanging->receives = std::move(receives);
  exchanging->host_ticket = host()->start(std::move(out), std::move(in));
  return under_way_.put(std::move(exchanging));
}

std::vector<const std::byte*> StagedExchange::finish(uint64_t ticket, Stream stream) {
  const std::shared_ptr<Exchanging> exchanging = under_way_.take(ticket);
  host()->finish(exchanging->host_ticket);
  device_->enter(stream);
  PayloadTaker taker(*device_, {}, stream);
  std::vector<std::shared_ptr<std::byte>> laid_from;  // kept until all is enqueued
  for (const size_t index : by_peer(exchanging->receives)) {
    const DeviceReceive& receive = exchanging->receives[index];
    HostMemory& arrived = *exchanging->arriving[index];
    const auto memory = device_->allocate(arrived.num_bytes());
    device_->write(memory.get(), arrived.data(), arrived.num_bytes(), stream);
    laid_from.push_back(memory);
    taker.take(receive, memory.get(), 0, receive.num_bytes);
  }
  taker.launch();
  return std::vector<const std::byte*>(exchanging->receives.size());
}

}  // namespace torchtp::exchange
