#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/contents.h"
#include "core/fd.h"
#include "net/streams.h"

namespace torchtp::net {

// Messages with tags, over one connection to each other rank. Those of one pair and tag arrive in the order sent; a
// receive may take one of any rank. Up to kEagerBytes a message goes at once, and waits at the receiver; a larger one,
// and all while the receiver has much that nobody asked for, is announced, and goes when it has been asked for. So
// what others send costs a rank a bounded amount of memory. Thread-safe.
//
// A message moves by itself and keeps its memory until then, whether or not its handle is kept.
class Mail {
 public:
  static constexpr int kAnyPeer = -1;
  static constexpr size_t kEagerBytes = size_t{64} << 10;

  struct Message;
  using MessagePtr = std::shared_ptr<Message>;
  using Memory = std::shared_ptr<std::byte>;  // owns what it points to

  Mail(int rank, std::map<int, Fd> connections, DescribeContents describe = in_bytes);
  ~Mail();
  Mail(const Mail&) = delete;
  Mail& operator=(const Mail&) = delete;

  // At most 2^31 - 1 as a tag; none below 0.
  MessagePtr send(int peer, int tag, Memory data, Contents contents);
  MessagePtr receive(int peer, int tag, Memory data, Contents contents);

  enum class State { kUnderWay, kDone, kFailed, kLost };
  State wait(const Message& message, std::chrono::milliseconds patience);
  // Of a message that is not under way: who sent it, and what is wrong with it (contents that differ, a connection that
  // was lost).
  int source(const Message& message) const;
  std::string trouble(const Message& message) const;

  // Tells all others why this rank goes, and waits until that is sent, but not for longer than `patience`.
  void say_goodbye(const std::string& why, std::chrono::milliseconds patience) noexcept;
  // What a peer said before it went; waits for that, or for the end of its connection.
  std::string goodbye_of(int peer, std::chrono::milliseconds patience);

  // Whether a peer's connection has ended without a goodbye.
  bool has_lost(int peer) const;

  void close() noexcept;

 private:
  enum class Kind : uint16_t { kEager = 1, kOffer, kAsk, kData, kRefusal, kTaken, kGoodbye };

  // Before each payload; `number` is one of the offers of a sender.
  struct Header {
    Kind kind;
    uint16_t dtype;
    int32_t tag;
    uint64_t num_bytes;
    uint64_t number;
  };

  static Contents contents_of(const Header& header) { return {header.num_bytes, static_cast<uint8_t>(header.dtype)}; }

  // Come, and not asked for yet.
  struct Arrival {
    int peer;
    Header header;
    Memory bytes;  // of an eager one
  };

  struct Peer {
    Header header{};                            // that is read
    uint64_t next_offer = 0, next_offered = 0;  // numbers: of this rank to the peer, and of the peer to it
    size_t not_taken =
        0;             // what eager messages cost the peer, as far as it has not said that somebody has asked for them
    size_t taken = 0;  // the same of this rank, not yet said
    std::map<uint64_t, MessagePtr> offered;  // by this rank
    std::map<uint64_t, MessagePtr> asked;    // offers of the peer that a receive has taken
    std::optional<std::string> goodbye;
    bool lost = false;
    std::string why;
  };

  static MessagePtr take_out(std::map<uint64_t, MessagePtr>& messages, uint64_t number);  // null: there is none
  void read_header(int peer);
  void take_header(int peer);
  void arrived(int peer, const Header& header, Memory bytes);
  void take(const MessagePtr& message, const Arrival& arrival);
  void post(int peer, Header header, Memory payload, size_t num_bytes, MessagePtr finishes);
  void give_back();
  void finish(const MessagePtr& message, int source);
  void fail(const MessagePtr& message, const std::string& why);
  void lose(int peer, const std::string& why);
  bool is_lost(const Message& message) const;

  const int rank_;
  const DescribeContents describe_;
  mutable std::mutex mutex_;  // of all below
  std::condition_variable changed_;
  std::map<int, Peer> peers_;
  std::list<MessagePtr> receives_;  // not matched, in the order posted
  std::list<Arrival> arrivals_;     // in the order in which they came
  size_t num_goodbyes_sent_ = 0;
  // Of messages that have ended. Given back without the lock: it may be a tensor of Python's, which has a lock of its
  // own.
  std::vector<Memory> ended_;
  bool closed_ = false;
  std::unique_ptr<Streams> streams_;
};

}  // namespace torchtp::net
