#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>

#include "core/fd.h"

namespace torchtp::net {

// Bytes over connections, one to each peer. What is posted to a peer arrives there in the order posted; both sides know
// the sizes, nothing else travels. A thread of its own moves the bytes, and sleeps when there is nothing to move.
// Thread-safe.
class Streams {
 public:
  class Message;
  // Dropped before it is done, it ends its connection: the bytes of the next would be taken for the rest of this.
  using MessagePtr = std::shared_ptr<Message>;
  // Called on the thread with each part of what arrives, in order; parts begin at multiples of kPartBytes. Must not
  // throw.
  using Arrived = std::function<void(const std::byte* part, size_t offset, size_t num_bytes)>;
  // Called on the thread, which holds no lock then: may post. Must not throw.
  using Done = std::function<void()>;
  using Lost = std::function<void(int peer, const std::string& why)>;

  static constexpr size_t kPartBytes = size_t{256} << 10;

  // `lost` is told of each connection that is lost before close().
  explicit Streams(std::map<int, Fd> connections, Lost lost = nullptr);
  ~Streams();
  Streams(const Streams&) = delete;
  Streams& operator=(const Streams&) = delete;

  bool reaches(int peer) const;

  // The memory must stay as it is until the message is done or dropped.
  MessagePtr send(int peer, const void* data, size_t num_bytes);
  MessagePtr receive(int peer, void* data, size_t num_bytes);
  MessagePtr receive(int peer, size_t num_bytes, Arrived arrived);

  // Without a handle: `done` is called when the message is. Never, where the connection is lost before.
  void send(int peer, const void* data, size_t num_bytes, Done done);
  void receive(int peer, void* data, size_t num_bytes, Done done);

  enum class State { kUnderWay, kDone, kLost };
  // Waits until the message is done or lost, not longer than `patience`.
  State wait(const Message& message, std::chrono::milliseconds patience);
  // Why the connection to a peer was lost.
  std::string trouble(int peer) const;

  // Ends all connections; what is under way is lost. Not to be called by Arrived.
  void close() noexcept;

 private:
  struct Connection;
  struct Item;
  struct Shared;

  std::shared_ptr<Item> post(int peer, bool sends, Item item);
  MessagePtr hand_out(int peer, bool sends, Item item);

  const std::shared_ptr<Shared> shared_;  // with the messages
  std::thread thread_;
};

}  // namespace torchtp::net
