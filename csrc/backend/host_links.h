#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <condition_variable>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/deadline.h"
#include "net/streams.h"
#include "shm/group.h"

namespace torchtp::backend {

// Messages of bytes between ranks of different hosts: those of collectives over streams of our own, those of users and
// of exchanges over point-to-point calls of an inner backend (gloo), which also reach ranks of the same host. Messages
// of one pair and tag arrive in the order sent; both sides know their size, and nothing is sent for none. A wait ends
// with its message, at its deadline, when the connection is lost, and when the group of this host is aborted.
// Thread-safe.
//
// A lost connection aborts the host's group, with the cause that the other side told before it went, if it could.
class HostLinks {
 public:
  // Users' tags lie below, those of exchanges above.
  static constexpr int kCause = (1 << 29) - 1;

  struct Message;
  using MessagePtr = std::shared_ptr<Message>;

  // `ranks`: all ranks of the group on other hosts.
  HostLinks(c10::intrusive_ptr<c10d::Backend> inner, std::unique_ptr<net::Streams> streams,
            std::shared_ptr<shm::Group> host, int rank, const std::vector<int>& ranks);
  ~HostLinks();
  HostLinks(const HostLinks&) = delete;
  HostLinks& operator=(const HostLinks&) = delete;

  // Of collectives, to and from ranks of other hosts. The memory must stay as it is until the message has been waited
  // for or dropped; one that is dropped before ends the connection.
  MessagePtr stream_to(int peer, const void* data, size_t num_bytes);
  MessagePtr stream_from(int peer, void* data, size_t num_bytes);
  MessagePtr stream_from(int peer, size_t num_bytes, net::Streams::Arrived arrived);

  // All others.
  MessagePtr send(int peer, int tag, const void* data, size_t num_bytes);
  MessagePtr receive(int peer, int tag, void* data, size_t num_bytes);
  MessagePtr receive_any(int tag, void* data, size_t num_bytes);

  // Returns the peer. `call`, for messages: "allreduce #7 (...)".
  int wait(const MessagePtr& message, const Deadline& deadline, const std::string& call);

  // The orderly end: says goodbye to the other hosts and waits for their goodbyes, but not for long. A connection that
  // ends while its other side still sends may lose what was sent.
  void part() noexcept;

  // Tells the ranks of other hosts why this one stops, and ends all connections. What is under way fails.
  void close(const std::string& cause) noexcept;

 private:
  struct Watched;

  MessagePtr post(int peer, int tag, void* data, size_t num_bytes, bool sends);
  int wait_for_stream(const Message& message, const Deadline& deadline, const std::string& call);
  int wait_for_inner(const Message& message, const Deadline& deadline, const std::string& call);
  [[noreturn]] void fail_late(int peer, const std::string& call);
  [[noreturn]] void fail_lost(int peer, const std::string& call, const std::string& trouble);
  void watch();
  [[noreturn]] void fail(const std::string& why);
  std::string told_by(int peer, std::chrono::milliseconds patience);
  void tell(c10d::Backend& inner, const std::string& cause) const;

  const std::shared_ptr<shm::Group> host_;
  const int rank_;
  const std::vector<int> ranks_;
  const std::unique_ptr<net::Streams> streams_;
  std::mutex mutex_;  // of the members below
  c10::intrusive_ptr<c10d::Backend> inner_;
  std::map<int, std::vector<char>> causes_;  // what peers tell before they go
  std::map<int, MessagePtr> cause_messages_;
  std::list<Watched*> watched_;
  std::condition_variable changed_;
  bool parked_ = false;
  bool stopping_ = false;
  std::thread watcher_;
};

}  // namespace torchtp::backend
