#include "exchange/payload_memory.h"

#include <algorithm>
#include <numeric>

namespace torchtp::exchange {

void PayloadMemory::pack(HaloDevice& device, const std::vector<const DeviceSend*>& sends, uint64_t ticket,
                         Stream stream) const {
  kernels::HaloPack pack;
  const auto launch = [&] {
    if (pack.num_headers > 0 || pack.moves.count > 0) device.pack(pack, stream);
    pack = {};
  };
  for (size_t message = 0; message < sends.size(); ++message) {
    const DeviceSend& send = *sends[message];
    const MessagePart& part = parts_.chunks[0][message];
    if (pack.num_headers == kernels::kMostHaloMoves) launch();
    pack.header_places[pack.num_headers] = reinterpret_cast<kernels::HaloHeader*>(data() + part.place);
    pack.headers[pack.num_headers++] = {ticket, static_cast<uint64_t>(send.num_bytes), 0, send.layout};
    for (const kernels::HaloSlab& slab : send.slabs) {
      if (pack.moves.is_full()) launch();
      pack.moves.add(kernels::HaloMove::make(slab, data() + part.payload(), 0, send.num_bytes));
    }
  }
  launch();
}

PayloadTaker::PayloadTaker(HaloDevice& device, const kernels::HaloContext& context, Stream stream)
    : device_(device), context_(context), stream_(stream) {
  begin();
}

void PayloadTaker::begin() {
  params_ = {};
  params_.context = context_;
  summed_.clear();
}

const std::byte* PayloadTaker::take(const DeviceReceive& receive, std::byte* header, int64_t begin, int64_t num_bytes) {
  std::byte* const payload = header + sizeof(kernels::HaloHeader) - begin;
  if (receive.num_bytes == 0) return nullptr;
  if (receive.slab.data == nullptr) return payload;
  const bool sums = receive.merge != kernels::HaloMerge::kCopy;
  const bool meets = std::any_of(summed_.begin(), summed_.end(),
                                 [&](const Interval& rows) { return !intersect(rows, receive.rows).empty(); });
  if (params_.moves.is_full() || (sums && meets)) launch();
  if (sums) summed_.push_back(receive.rows);
  auto move = kernels::HaloMove::make(receive.slab, payload, begin, num_bytes, receive.merge);
  move.header = reinterpret_cast<const kernels::HaloHeader*>(header);
  move.layout = receive.layout;
  move.layout_out = receive.layout_out;
  params_.moves.add(move);
  return nullptr;
}

void PayloadTaker::free(const kernels::HaloFree& free) {
  params_.frees.frees[params_.frees.count++] = free;
  if (params_.frees.count == kernels::kMostHaloChannels) launch();
}

void PayloadTaker::launch() {
  if (params_.moves.count > 0 || params_.frees.count > 0) device_.take(params_, stream_);
  begin();
}

std::vector<size_t> by_peer(const std::vector<DeviceReceive>& receives) {
  std::vector<size_t> order(receives.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return receives[a].peer < receives[b].peer; });
  return order;
}

}  // namespace torchtp::exchange
