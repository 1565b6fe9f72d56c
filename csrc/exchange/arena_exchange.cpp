#include "exchange/arena_exchange.h"

#include <algorithm>

#include "core/format.h"
#include "exchange/halo_trouble.h"
#include "exchange/payload_memory.h"

namespace torchtp::exchange {

using kernels::HaloMove;

// NOTE [who may wait for whom]
// Work on a rank's streams waits for work of other ranks, so the order in which a rank enqueues it decides whether all
// come through. Let (exchange, chunk, what) order all work, pushing before taking. A push waits for the take of the
// chunk before the last of its kind, a take for its push. Every rank enqueues in that order, with one liberty: the take
// of an exchange in one chunk may come behind the pushes of the next one, which do not wait for it. So: an exchange
// that is not finished is completed before the second next one starts, one of several chunks before the next one does.

struct ArenaExchange::Exchanging {
  uint64_t ticket;
  std::vector<DeviceSend> sends;
  std::vector<DeviceReceive> receives;
  std::vector<Flow> out, in;
  size_t num_chunks = 0;
  uint64_t graph;  // 0: runs as it is enqueued
  bool completed = false, finished = false;
  std::vector<const std::byte*> left;      // [receives]
  std::vector<kernels::HaloFree> staying;  // freed by release()
};

ArenaExchange::ArenaExchange(std::shared_ptr<HaloDevice> device, ArenaMemory memory, shm::Bootstrap& bootstrap,
                             std::chrono::milliseconds timeout, std::string name)
    : device_(std::move(device)),
      memory_(std::move(memory)),
      rank_(bootstrap.rank()),
      name_(std::move(name)),
      timeout_(timeout),
      layout_(bootstrap.size(), memory_.num_bytes),
      out_turns_(2 * bootstrap.size()),
      in_turns_(2 * bootstrap.size()) {
  std::byte* const base = memory_.bases[rank_];
  const std::vector<std::byte> zeros(layout_.head_bytes());
  device_->write(base, zeros.data(), zeros.size(), nullptr);
  std::vector<void*> table(memory_.bases.begin(), memory_.bases.end());
  device_->write(base + layout_.table(), table.data(), table.size() * sizeof(void*), nullptr);
  context_.rank = static_cast<uint32_t>(rank_);
  context_.size = static_cast<uint32_t>(bootstrap.size());
  context_.deadline_nanoseconds = static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::min(timeout, kLongestTimeout)).count());
  context_.control = reinterpret_cast<kernels::HaloControl*>(base);
  context_.others = reinterpret_cast<kernels::HaloControl* const*>(base + layout_.table());
  context_.left = reinterpret_cast<const kernels::HaloWord*>(base + layout_.left(0));
  context_.fault = memory_.fault;
  bootstrap.all_gather("");  // every arena is zero before anybody writes into another one
}

ArenaExchange::~ArenaExchange() {
  try {
    for (int peer = 0; peer < size(); ++peer) {
      auto* const left = reinterpret_cast<kernels::HaloWord*>(memory_.bases[peer] + layout_.left(rank_));
      if (peer != rank_) device_->store(&left->value, 1);
    }
  } catch (const std::exception&) {  // peers meet their deadline instead
  }
}

uint64_t* ArenaExchange::word(int owner, int peer, int slot, ArenaLayout::Word word) const {
  return reinterpret_cast<uint64_t*>(memory_.bases[owner] + layout_.word(peer, slot, word));
}

std::byte* ArenaExchange::slot(int owner, int peer, int slot) const {
  return memory_.bases[owner] + layout_.slot(owner, peer, slot);
}

int64_t ArenaExchange::largest_left() const {
  return static_cast<int64_t>(layout_.slot_bytes(0) - sizeof(kernels::HaloHeader));
}

std::vector<ArenaExchange::Flow> ArenaExchange::flows_of(const std::vector<std::pair<int, int64_t>>& messages,
                                                         std::vector<int>& turns) {
  std::map<int, std::pair<std::vector<size_t>, std::vector<int64_t>>> by_peer;
  for (size_t i = 0; i < messages.size(); ++i) {
    auto& [indices, sizes] = by_peer[messages[i].first];
    indices.push_back(i);
    sizes.push_back(messages[i].second);
  }
  std::vector<Flow> flows;
  for (auto& [peer, entry] : by_peer) {
    Flow flow{peer,
              std::move(entry.first),
              cut_messages(entry.second, layout_.slot_bytes(0), layout_.slot_bytes(2)),
              {},
              false};
    const int kind = flow.parts.whole ? 0 : 1;
    int& turn = turns.at(2 * peer + kind);
    for (size_t chunk = 0; chunk < flow.parts.chunks.size(); ++chunk) {
      flow.slots.push_back(2 * kind + turn);
      turn ^= 1;
    }
    flows.push_back(std::move(flow));
  }
  return flows;
}

uint64_t ArenaExchange::start(std::vector<DeviceSend> sends, std::vector<DeviceReceive> receives, Stream stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  require_no_trouble();
  const uint64_t ticket = last_ticket_ + 1;
  for (auto& [number, before] : under_way_) {
    if (number + 2 <= ticket && !before->staying.empty()) {
      throw Error(cat("exchange ", number,
                      ": what it received is still in use where it arrived; release it before "
                      "exchange ",
                      ticket, " starts"));
    }
  }
  leave_other_graphs(stream);
  last_ticket_ = ticket;
  device_->enter(stream);
  for (auto& [number, before] : under_way_) {
    if (number + 2 <= ticket || before->num_chunks > 1) complete(*before, stream);
  }
  auto exchanging = std::make_shared<Exchanging>();
  exchanging->ticket = ticket;
  exchanging->graph = device_->graph_of(stream);
  std::vector<std::pair<int, int64_t>> sizes;
  for (const DeviceSend& send : sends) sizes.emplace_back(send.peer, send.num_bytes);
  exchanging->out = flows_of(sizes, out_turns_);
  sizes.clear();
  for (const DeviceReceive& receive : receives) sizes.emplace_back(receive.peer, receive.num_bytes);
  exchanging->in = flows_of(sizes, in_turns_);
  exchanging->left.resize(receives.size());
  for (const auto* flows : {&exchanging->out, &exchanging->in}) {
    for (const Flow& flow : *flows) {
      exchanging->num_chunks = std::max(exchanging->num_chunks, flow.parts.chunks.size());
    }
  }
  for (Flow& flow : exchanging->in) {
    for (const size_t message : flow.messages) {
      if (receives[message].slab.data != nullptr || receives[message].num_bytes == 0) continue;
      if (!flow.parts.whole) throw Error(cat("a message of ", receives[message].num_bytes, " bytes cannot stay"));
      flow.stays = true;
    }
  }
  exchanging->sends = std::move(sends);
  exchanging->receives = std::move(receives);
  under_way_.emplace(ticket, exchanging);
  push(*exchanging, 0, stream);
  return ticket;
}

// A graph's run neither waits for what was begun outside of it nor leaves anything to others.
void ArenaExchange::require_one_graph(const Exchanging& exchanging, Stream stream) const {
  if (exchanging.graph == device_->graph_of(stream)) return;
  throw Error(cat("exchange ", exchanging.ticket,
                  exchanging.graph == 0
                      ? " is under way: finish and release it before a graph is captured"
                      : " was captured in a graph that has ended: capture what finishes and releases it too"));
}

// What a capture that failed has left never runs.
void ArenaExchange::leave_other_graphs(Stream stream) {
  const uint64_t graph = device_->graph_of(stream);
  for (auto next = under_way_.begin(); next != under_way_.end();) {
    const Exchanging& before = *next->second;
    if (before.graph == 0) require_one_graph(before, stream);
    next = before.graph == 0 || before.graph == graph ? std::next(next) : under_way_.erase(next);
  }
}

void ArenaExchange::push(Exchanging& exchanging, size_t chunk, Stream stream) {
  kernels::HaloPushParams params;
  const auto begin = [&] {
    params = {};
    params.context = context_;
  };
  const auto launch = [&] {
    if (params.num_channels > 0) device_->push(params, stream);
    begin();
  };
  begin();
  for (const Flow& flow : exchanging.out) {
    if (flow.parts.chunks.size() <= chunk) continue;
    const int slot_index = flow.slots[chunk];
    std::byte* const place = slot(flow.peer, rank_, slot_index);
    const auto begin_channel = [&] {
      auto& channel = params.channels[params.num_channels++];
      channel.awaited = {static_cast<uint32_t>(flow.peer), exchanging.ticket, kernels::kAwaitsRoom};
      channel.sent = word(rank_, flow.peer, slot_index, ArenaLayout::kSent);
      channel.free = word(rank_, flow.peer, slot_index, ArenaLayout::kFree);
      channel.arrived = nullptr;
    };
    if (params.num_channels == kernels::kMostHaloChannels) launch();
    begin_channel();
    for (const MessagePart& part : flow.parts.chunks[chunk]) {
      const DeviceSend& send = exchanging.sends[flow.messages[part.message]];
      kernels::HaloPack& pack = params.pack;
      if (pack.num_headers == kernels::kMostHaloMoves) {
        launch();
        begin_channel();
      }
      pack.header_places[pack.num_headers] = reinterpret_cast<kernels::HaloHeader*>(place + part.place);
      pack.headers[pack.num_headers++] = {exchanging.ticket, static_cast<uint64_t>(send.num_bytes),
                                          static_cast<uint64_t>(part.begin), send.layout};
      for (const kernels::HaloSlab& slab : send.slabs) {
        if (pack.moves.is_full()) {
          launch();
          begin_channel();
        }
        pack.moves.add(HaloMove::make(slab, place + part.payload() - part.begin, part.begin, part.num_bytes));
      }
    }
    params.channels[params.num_channels - 1].arrived = word(flow.peer, rank_, slot_index, ArenaLayout::kArrived);
  }
  if (params.num_channels > 0) device_->push(params, stream);
}

void ArenaExchange::wait(const Exchanging& exchanging, size_t chunk, Stream stream) {
  kernels::HaloWaitParams params;
  params.context = context_;
  const auto launch = [&] {
    device_->wait(params, stream);
    params.count = 0;
  };
  for (const Flow& flow : exchanging.in) {
    if (flow.parts.chunks.size() <= chunk) continue;
    const int slot_index = flow.slots[chunk];
    bool first = true;
    for (const MessagePart& part : flow.parts.chunks[chunk]) {
      const DeviceReceive& receive = exchanging.receives[flow.messages[part.message]];
      if (params.count == kernels::kMostHaloMoves) launch();
      kernels::HaloIncoming& incoming = params.incoming[params.count++];
      incoming.awaited = {static_cast<uint32_t>(flow.peer), exchanging.ticket,
                          static_cast<uint64_t>(receive.num_bytes)};
      incoming.taken = first ? word(rank_, flow.peer, slot_index, ArenaLayout::kTaken) : nullptr;
      incoming.arrived = word(rank_, flow.peer, slot_index, ArenaLayout::kArrived);
      incoming.header = reinterpret_cast<const kernels::HaloHeader*>(slot(rank_, flow.peer, slot_index) + part.place);
      incoming.stays = receive.slab.data == nullptr && receive.layout.matters();
      incoming.layout = receive.layout.layout;
      first = false;
    }
  }
  if (params.count > 0) launch();
}

void ArenaExchange::take(Exchanging& exchanging, size_t chunk, Stream stream) {
  PayloadTaker taker(*device_, context_, stream);
  for (const Flow& flow : exchanging.in) {
    if (flow.parts.chunks.size() <= chunk) continue;
    const int slot_index = flow.slots[chunk];
    for (const MessagePart& part : flow.parts.chunks[chunk]) {
      const size_t index = flow.messages[part.message];
      exchanging.left[index] = taker.take(exchanging.receives[index], slot(rank_, flow.peer, slot_index) + part.place,
                                          part.begin, part.num_bytes);
    }
    const kernels::HaloFree free{word(rank_, flow.peer, slot_index, ArenaLayout::kTaken),
                                 word(flow.peer, rank_, slot_index, ArenaLayout::kFree)};
    if (flow.stays) {
      exchanging.staying.push_back(free);
    } else {
      taker.free(free);
    }
  }
  taker.launch();
}

void ArenaExchange::complete(Exchanging& exchanging, Stream stream) {
  if (exchanging.completed) return;
  exchanging.completed = true;
  for (size_t chunk = 0; chunk < exchanging.num_chunks; ++chunk) {
    if (chunk > 0) push(exchanging, chunk, stream);
    wait(exchanging, chunk, stream);
    take(exchanging, chunk, stream);
  }
}

std::vector<const std::byte*> ArenaExchange::finish(uint64_t ticket, Stream stream) {
  std::shared_ptr<Exchanging> exchanging;  // its tensors go after the lock
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = under_way_.find(ticket);
  if (found == under_way_.end() || found->second->finished) throw Error(cat("no exchange ", ticket, " is under way"));
  require_no_trouble();
  require_one_graph(*found->second, stream);
  exchanging = found->second;
  exchanging->finished = true;
  device_->enter(stream);
  for (auto& [number, before] : under_way_) {
    if (number <= ticket) complete(*before, stream);
  }
  if (exchanging->staying.empty()) under_way_.erase(found);
  require_no_trouble();
  return exchanging->left;
}

void ArenaExchange::release(uint64_t ticket, Stream stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = under_way_.find(ticket);
  if (found == under_way_.end() || !found->second->finished) throw Error(cat("exchange ", ticket, " holds nothing"));
  require_one_graph(*found->second, stream);
  device_->enter(stream);
  // Now and not with the next exchange: nobody knows whether that one is a replay, whose launches are made already.
  PayloadTaker taker(*device_, context_, stream);
  for (const kernels::HaloFree& free : found->second->staying) taker.free(free);
  taker.launch();
  under_way_.erase(found);
}

void ArenaExchange::check() {
  std::lock_guard<std::mutex> lock(mutex_);
  require_no_trouble();
}

void ArenaExchange::require_no_trouble() {
  if (cause_.empty()) cause_ = trouble_of(*memory_.fault, timeout_);
  if (!cause_.empty()) throw Error(cause_);
}

}  // namespace torchtp::exchange
