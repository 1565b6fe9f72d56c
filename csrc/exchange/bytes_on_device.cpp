#include "exchange/bytes_on_device.h"

#include <algorithm>

namespace torchtp::exchange {
namespace {

kernels::HaloSlab one_run(std::byte* data, size_t num_bytes) {
  kernels::HaloSlab slab;
  slab.data = data;
  slab.outer = slab.rows = 1;
  slab.run_bytes = static_cast<int64_t>(num_bytes);
  return slab;
}

}  // namespace

uint64_t BytesOnDevice::start(std::vector<Send> sends, std::vector<Receive> receives) {
  std::vector<DeviceSend> out;
  for (const Send& send : sends) {
    std::vector<std::byte> bytes(send.num_bytes);
    if (send.num_bytes > 0) send.source->read(0, bytes.data(), send.num_bytes);
    const auto memory = device_->allocate(send.num_bytes);
    device_->write(memory.get(), bytes.data(), send.num_bytes, nullptr);
    out.push_back({send.peer,
                   send.layout,
                   static_cast<int64_t>(send.num_bytes),
                   {one_run(memory.get(), send.num_bytes)},
                   memory});
  }
  std::stable_sort(receives.begin(), receives.end(),
                   [](const Receive& a, const Receive& b) { return a.peer < b.peer; });
  std::vector<DeviceReceive> in;
  std::vector<Arriving> arriving;
  for (Receive& receive : receives) {
    const auto memory = device_->allocate(receive.num_bytes), layout = device_->allocate(sizeof(uint32_t));
    DeviceReceive to;
    to.peer = receive.peer;
    to.num_bytes = static_cast<int64_t>(receive.num_bytes);
    to.slab = one_run(memory.get(), receive.num_bytes);
    to.memory = memory;
    to.layout_out = reinterpret_cast<uint32_t*>(layout.get());
    in.push_back(std::move(to));
    arriving.push_back({std::move(receive), memory, layout});
  }
  const uint64_t ticket = exchange_->start(std::move(out), std::move(in), nullptr);
  const std::lock_guard<std::mutex> lock(mutex_);
  arriving_[ticket] = std::move(arriving);
  return ticket;
}

void BytesOnDevice::finish(uint64_t ticket) {
  std::vector<Arriving> arriving;
  {
    exchange_->finish(ticket, nullptr);
    const std::lock_guard<std::mutex> lock(mutex_);
    arriving = std::move(arriving_[ticket]);
    arriving_.erase(ticket);
  }
  std::vector<std::vector<std::byte>> contents;
  std::vector<uint32_t> layouts(arriving.size());
  for (size_t i = 0; i < arriving.size(); ++i) {
    contents.emplace_back(arriving[i].receive.num_bytes);
    device_->read(contents[i].data(), arriving[i].memory.get(), contents[i].size(), nullptr);
    device_->read(&layouts[i], arriving[i].layout.get(), sizeof(uint32_t), nullptr);
  }
  exchange_->check();
  for (size_t i = 0; i < arriving.size(); ++i) {
    if (contents[i].empty()) continue;
    arriving[i].receive.sink->write(layouts[i], 0, contents[i].data(), contents[i].size());
  }
}

}  // namespace torchtp::exchange
