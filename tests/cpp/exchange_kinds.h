#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "exchange/arena_exchange.h"
#include "exchange/bytes_on_device.h"
#include "exchange/shm_exchange.h"
#include "exchange/staged_exchange.h"
#include "exchange/thread_exchange.h"
#include "ranks.h"
#include "shm/group.h"

// The kinds of exchange that exchange_test.cpp runs, with ranks as threads, and messages that check themselves.
namespace torchtp::test {

using namespace exchange;
using std::chrono::milliseconds;

// Byte i of a message is a hash of its key and i.
inline std::byte content(uint64_t key, size_t i) {
  return static_cast<std::byte>((key * 1315423911u + i * 2654435761u) >> 13);
}

class KeySource final : public Source {
 public:
  explicit KeySource(uint64_t key) : key_(key) {}
  void read(size_t offset, std::byte* out, size_t num_bytes) const override {
    for (size_t i = 0; i < num_bytes; ++i) out[i] = content(key_, offset + i);
  }

 private:
  uint64_t key_;
};

class KeySink final : public Sink {
 public:
  KeySink(uint64_t key, std::vector<int>* order = nullptr, int peer = 0) : key_(key), order_(order), peer_(peer) {}
  void write(uint32_t layout, size_t offset, const std::byte* in, size_t num_bytes) override {
    CHECK_EQUAL(layout, static_cast<uint32_t>(key_ & 7));
    CHECK_EQUAL(offset, written);
    CHECK(offset % 64 == 0);
    for (size_t i = 0; i < num_bytes; ++i) CHECK(in[i] == content(key_, offset + i));
    if (order_ && offset == 0) order_->push_back(peer_);
    written += num_bytes;
  }

  size_t written = 0;

 private:
  uint64_t key_;
  std::vector<int>* order_;
  int peer_;
};

inline uint64_t key_of(uint64_t step, int from, int to) { return (step * 64 + from) * 64 + to; }

inline Send send_of(uint64_t step, int from, int to, size_t num_bytes) {
  const uint64_t key = key_of(step, from, to);
  return {to, static_cast<uint32_t>(key & 7), num_bytes, std::make_shared<KeySource>(key)};
}

using Body = std::function<void(Exchange&, torchtp::shm::Bootstrap&)>;

// Runs a body on ranks with one kind of exchange.
struct Kind {
  std::string name;
  std::function<void(int size, milliseconds timeout, const Body&)> run;
  std::function<void(Exchange&, const std::string&)> abort;  // null: nobody can
};

constexpr milliseconds kLong{60000};
constexpr size_t kRing = 16384;

// The group of an exchange that can be aborted.
class AbortableShmExchange final : public Exchange {
 public:
  explicit AbortableShmExchange(std::shared_ptr<torchtp::shm::Group> g) : group(g), exchange(g) {}
  int rank() const override { return exchange.rank(); }
  int size() const override { return exchange.size(); }
  uint64_t start(std::vector<Send> s, std::vector<Receive> r) override {
    return exchange.start(std::move(s), std::move(r));
  }
  void finish(uint64_t ticket) override { exchange.finish(ticket); }

  std::shared_ptr<torchtp::shm::Group> group;
  ShmExchange exchange;
};

// What devices that see each other's memory do, with threads for devices.
struct HostArenas {
  static constexpr size_t kBytes = 128 << 10;
  struct alignas(4096) Page {
    std::byte bytes[4096];
  };
  std::vector<std::vector<Page>> arenas;
  std::vector<torchtp::kernels::HaloFault> faults;

  explicit HostArenas(int size) : faults(size) {
    for (int rank = 0; rank < size; ++rank) arenas.emplace_back(kBytes / sizeof(Page));
  }
  static ArenaMemory of(torchtp::shm::Bootstrap& bootstrap) {
    const auto shared =
        std::static_pointer_cast<HostArenas>(bootstrap.share(std::make_shared<HostArenas>(bootstrap.size())));
    ArenaMemory memory{{}, kBytes, &shared->faults[bootstrap.rank()], shared};
    for (auto& pages : shared->arenas) memory.bases.push_back(pages[0].bytes);
    return memory;
  }
};

inline const std::vector<Kind>& kinds() {
  static const std::vector<Kind> all = {
      {"shm",
       [](int size, milliseconds timeout, const Body& body) {
         run_threads(size, [&](torchtp::shm::Bootstrap& bootstrap) {
           torchtp::shm::GroupOptions options;
           options.slot_bytes = 4096;
           options.heap_bytes = 4096;
           options.ring_bytes = kRing;
           options.timeout = timeout;
           AbortableShmExchange exchange(torchtp::shm::Group::create(bootstrap, options));
           body(exchange, bootstrap);
         });
       },
       [](Exchange& exchange, const std::string& why) {
         dynamic_cast<AbortableShmExchange&>(exchange).group->abort(why);
       }},
      {"threads",
       [](int size, milliseconds timeout, const Body& body) {
         const auto hub = make_thread_hub(size, timeout);
         run_threads(size, [&](torchtp::shm::Bootstrap& bootstrap) {
           ThreadExchange exchange(hub, bootstrap.rank());
           body(exchange, bootstrap);
         });
       },
       [](Exchange& exchange, const std::string& why) { dynamic_cast<ThreadExchange&>(exchange).abort(why); }},
      {"arena",
       [](int size, milliseconds timeout, const Body& body) {
         run_threads(size, [&](torchtp::shm::Bootstrap& bootstrap) {
           const auto device = std::make_shared<HostHaloDevice>();
           BytesOnDevice exchange(
               std::make_shared<ArenaExchange>(device, HostArenas::of(bootstrap), bootstrap, timeout, "arena"), device);
           body(exchange, bootstrap);
         });
       },
       nullptr},
      {"staged",
       [](int size, milliseconds timeout, const Body& body) {
         const auto hub = make_thread_hub(size, timeout);
         run_threads(size, [&](torchtp::shm::Bootstrap& bootstrap) {
           const auto device = std::make_shared<HostHaloDevice>();
           const auto host = std::make_shared<ThreadExchange>(hub, bootstrap.rank());
           BytesOnDevice exchange(std::make_shared<StagedExchange>(device, host, bootstrap.rank(), size), device);
           body(exchange, bootstrap);
         });
       },
       nullptr},
  };
  return all;
}

}  // namespace torchtp::test
