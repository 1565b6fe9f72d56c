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

  static constexpr size_t kPartBytes = size_t{256} << 10;

  explicit Streams(std::map<int, Fd> connections);
  ~Streams();
  Streams(const Streams&) = delete;
  Streams& operator=(const Streams&) = delete;

  bool reaches(int peer) const;

  // The memory must stay as it is until the message is done or dropped.
  MessagePtr send(int peer, const void* data, size_t num_bytes);
  MessagePtr receive(int peer, void* data, size_t num_bytes);
  MessagePtr receive(int peer, size_t num_bytes, Arrived arrived);

  enum class State { kUnderWay, kDone, kLost };
  // Waits until the message is done or lost, not longer than `patience`.
  State wait(const Message& message, std::chrono::milliseconds patience);
  // Why the connection to a peer was lost.
  std::string trouble(int peer) const;

  // Ends all connections; what is under way is lost. Not to be called by Arrived.
  void close() noexcept;

 private:
  struct Connection;
  struct Shared;

  MessagePtr post(int peer, std::byte* data, size_t num_bytes, bool sends, Arrived arrived);

  const std::shared_ptr<Shared> shared_;  // with the messages
  std::thread thread_;
};

}  // namespace torchtp::net
