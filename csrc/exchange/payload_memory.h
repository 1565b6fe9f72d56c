#pragma once

#include <vector>

#include "exchange/device_exchange.h"
#include "exchange/halo_device.h"
#include "exchange/message_parts.h"

// Packing to and laying from memory of the device, for transports that move that memory by other means.
namespace torchtp::exchange {

// Messages one after the other, each behind its header.
class PayloadMemory {
 public:
  PayloadMemory(HaloDevice& device, const std::vector<int64_t>& sizes)
      : parts_(cut_messages(sizes, SIZE_MAX / 2, 0)), memory_(device.allocate(total(parts_))) {}

  std::byte* data() const { return memory_.get(); }
  size_t num_bytes() const { return total(parts_); }
  // The header of a message.
  std::byte* place(size_t message) const { return data() + parts_.chunks[0][message].place; }
  void pack(HaloDevice& device, const std::vector<const DeviceSend*>& sends, uint64_t ticket, Stream stream) const;

 private:
  static size_t total(const MessageChunks& parts) {
    size_t bytes = 0;
    for (const MessagePart& part : parts.chunks[0]) bytes = part.payload() + line_up(part.num_bytes);
    return bytes;
  }

  MessageChunks parts_;
  std::shared_ptr<std::byte> memory_;
};

// Lays messages into their receives, in the order of the calls; launches what it has gathered as late as it may.
class PayloadTaker {
 public:
  // With an empty context for a transport without slots.
  PayloadTaker(HaloDevice& device, const kernels::HaloContext& context, Stream stream);
  // A part of the receive's payload, behind its header. Returns where the payload stays, or null.
  const std::byte* take(const DeviceReceive& receive, std::byte* header, int64_t begin, int64_t num_bytes);
  // Once all that was taken so far is laid.
  void free(const kernels::HaloFree& free);
  void launch();

 private:
  void begin();

  HaloDevice& device_;
  const kernels::HaloContext context_;
  const Stream stream_;
  kernels::HaloTakeParams params_;
  std::vector<Interval> summed_;
};

// Indices in ascending order of peers, those of one peer in the order given.
std::vector<size_t> by_peer(const std::vector<DeviceReceive>& receives);

}  // namespace torchtp::exchange
