// Exchanges that a graph captures: replayed in turns with plain ones, with threads for devices.

#include <cstring>
#include <functional>
#include <utility>

#include "exchange_kinds.h"

using namespace torchtp::test;
namespace kernels = torchtp::kernels;

namespace {

// What is enqueued while it captures is kept for replays and not run.
class CapturingDevice final : public HaloDevice {
 public:
  void pack(const kernels::HaloPack& pack, Stream stream) override {
    enqueue([=] { host_.pack(pack, stream); });
  }
  void push(const kernels::HaloPushParams& params, Stream stream) override {
    enqueue([=] { host_.push(params, stream); });
  }
  void wait(const kernels::HaloWaitParams& params, Stream stream) override {
    enqueue([=] { host_.wait(params, stream); });
  }
  void take(const kernels::HaloTakeParams& params, Stream stream) override {
    enqueue([=] { host_.take(params, stream); });
  }
  void enter(Stream stream) override { host_.enter(stream); }
  uint64_t graph_of(Stream) override { return captures_ ? graphs_ : 0; }
  void write(void* to, const void* from, size_t num_bytes, Stream stream) override {
    host_.write(to, from, num_bytes, stream);
  }
  void read(void* to, const void* from, size_t num_bytes, Stream stream) override {
    host_.read(to, from, num_bytes, stream);
  }
  void store(uint64_t* word, uint64_t value) override { host_.store(word, value); }
  std::shared_ptr<std::byte> allocate(size_t num_bytes) override { return host_.allocate(num_bytes); }

  // Work of the caller's own, as a kernel.
  void enqueue(const std::function<void()>& work) { captures_ ? graph_.push_back(work) : work(); }
  std::vector<std::function<void()>> capture(const std::function<void()>& body) {
    captures_ = true;
    ++graphs_;
    body();
    captures_ = false;
    return std::exchange(graph_, {});
  }

 private:
  HostHaloDevice host_;
  std::vector<std::function<void()>> graph_;
  uint64_t graphs_ = 0;
  bool captures_ = false;
};

constexpr int64_t kBytes = 200;

// A rank whose exchanges take a byte that it names to both neighbours in a ring. What arrives is read where it lies.
class Ring {
 public:
  explicit Ring(torchtp::shm::Bootstrap& bootstrap)
      : rank(bootstrap.rank()),
        size(bootstrap.size()),
        device(std::make_shared<CapturingDevice>()),
        exchange(device, HostArenas::of(bootstrap), bootstrap, milliseconds(3000), "arena") {}

  uint64_t start(bool stays) {
    std::vector<DeviceSend> sends;
    std::vector<DeviceReceive> receives;
    for (const int peer : {(rank + size - 1) % size, (rank + 1) % size}) {
      sends.push_back({peer, 0, kBytes, {slab(outgoing.data())}, nullptr});
      DeviceReceive receive;
      receive.peer = peer;
      receive.num_bytes = kBytes;
      if (!stays) receive.slab = slab(incoming[receives.size()].data());
      receives.push_back(receive);
    }
    return exchange.start(std::move(sends), std::move(receives), nullptr);
  }
  // As the work behind it finds it.
  void finish(uint64_t ticket, bool stays) {
    const auto left = exchange.finish(ticket, nullptr);
    device->enqueue([this, left] {
      for (size_t i = 0; i < 2; ++i) found[i] = left[i] ? *left[i] : incoming[i].front();
    });
    if (stays) exchange.release(ticket, nullptr);
  }
  void run(bool stays) { finish(start(stays), stays); }
  // Of what is enqueued from here on.
  void name(int step) { std::fill(outgoing.begin(), outgoing.end(), named(rank, step)); }
  void check(int step) {
    exchange.check();
    CHECK(found[0] == named((rank + size - 1) % size, step) && found[1] == named((rank + 1) % size, step));
  }

  const int rank, size;
  const std::shared_ptr<CapturingDevice> device;
  ArenaExchange exchange;

 private:
  static std::byte named(int rank, int step) { return static_cast<std::byte>(10 * step + rank); }
  static kernels::HaloSlab slab(std::byte* data) {
    kernels::HaloSlab slab;
    slab.data = data;
    slab.outer = slab.rows = 1;
    slab.run_bytes = kBytes;
    return slab;
  }

  std::vector<std::byte> outgoing = std::vector<std::byte>(kBytes);
  std::vector<std::byte> incoming[2] = {outgoing, outgoing};
  std::byte found[2] = {};
};

// Whatever slots plain exchanges use before, between and after replays.
void replays_and_plain_exchanges(int size, bool stays, int before, int captured) {
  run_threads(size, [&](torchtp::shm::Bootstrap& bootstrap) {
    Ring ring(bootstrap);
    int step = 0;
    const auto plain = [&](int count) {
      for (int i = 0; i < count; ++i) {
        ring.name(++step);
        ring.run(stays);
        ring.check(step);
      }
    };
    plain(before);
    const auto capture = [&] {
      return ring.device->capture([&] {
        for (int i = 0; i < captured; ++i) ring.run(stays);
      });
    };
    const auto unused = capture();  // a graph that never runs holds nothing
    const auto graph = capture();
    for (const int plain_between : {0, 1, 1, 2, 0, 3, 1}) {
      ring.name(++step);
      for (const auto& work : graph) work();
      ring.check(step);
      plain(plain_between);
    }
  });
}

void replays_in_turns_with_plain_exchanges() {
  for (const bool stays : {false, true}) {
    for (int before = 1; before < 4; ++before) {
      for (int captured = 1; captured < 4; ++captured) replays_and_plain_exchanges(2, stays, before, captured);
    }
    replays_and_plain_exchanges(4, stays, 3, 1);
  }
}

void a_graph_holds_whole_exchanges() {
  run_threads(2, [](torchtp::shm::Bootstrap& bootstrap) {
    Ring ring(bootstrap);
    const uint64_t ticket = ring.start(true);
    ring.device->capture([&] {
      CHECK_CONTAINS(error_of([&] { ring.start(true); }), "exchange 1 is under way: finish and release it before");
      CHECK_CONTAINS(error_of([&] { ring.finish(ticket, true); }), "exchange 1 is under way");
    });
    ring.finish(ticket, true);
    ring.run(true);
    uint64_t captured = 0;
    ring.device->capture([&] { captured = ring.start(true); });
    CHECK_CONTAINS(error_of([&] { ring.finish(captured, true); }), "exchange 3 was captured in a graph");
    ring.run(true);  // what was left of that capture never runs
    ring.device->capture([&] { captured = ring.start(true); });
    const auto graph = ring.device->capture([&] { ring.run(true); });
    ring.name(7);
    for (const auto& work : graph) work();
    ring.check(7);
  });
}

}  // namespace

int main() {
  return run({{"replays in turns with plain exchanges", replays_in_turns_with_plain_exchanges},
              {"a graph holds whole exchanges", a_graph_holds_whole_exchanges}});
}
