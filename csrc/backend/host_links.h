#pragma once

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/deadline.h"
#include "core/fork_guard.h"
#include "net/mail.h"
#include "net/streams.h"
#include "shm/group.h"

namespace torchtp::backend {

// What the ranks of several hosts send each other: bytes of collectives, to ranks of other hosts, and messages of users
// and of exchanges, to all. A wait ends with its message, at its deadline, when the connection is lost, and when the
// group of this host is aborted. Thread-safe.
//
// A lost connection aborts the host's group, with the cause that the other side told before it went, if it could.
class HostLinks {
 public:
  struct Message;
  using MessagePtr = std::shared_ptr<Message>;

  HostLinks(std::map<int, Fd> streams, std::map<int, Fd> mail, std::shared_ptr<shm::Group> host, int rank,
            std::shared_ptr<ForkGuard> fork_guard);
  ~HostLinks();
  HostLinks(const HostLinks&) = delete;
  HostLinks& operator=(const HostLinks&) = delete;

  // Of collectives; those of one pair arrive in the order sent. The memory must stay as it is until the message has
  // been waited for or dropped; one that is dropped before ends the connection.
  MessagePtr stream_to(int peer, const void* data, size_t num_bytes);
  MessagePtr stream_from(int peer, void* data, size_t num_bytes);
  MessagePtr stream_from(int peer, size_t num_bytes, net::Streams::Arrived arrived);

  // All others; those of one pair and tag arrive in the order sent. `peer` may be net::Mail::kAnyPeer for a receive.
  MessagePtr send(int peer, int tag, net::Mail::Memory data, Contents contents);
  MessagePtr receive(int peer, int tag, net::Mail::Memory data, Contents contents);

  // Whether waiting for what send() or receive() gave would take time.
  bool is_under_way(const MessagePtr& message);
  // Returns the peer. `call`, for errors: "allreduce #7 (...)".
  int wait(const MessagePtr& message, const Deadline& deadline, const std::string& call);

  // The orderly end: says goodbye to the others and waits for their goodbyes, but not for long. A connection that ends
  // while its other side still sends may lose what was sent. With the `error` by which the program ends, if there is
  // one.
  void part(const std::string& error) noexcept;

  // Tells the others why this rank stops, and ends all connections. What is under way fails.
  void close(const std::string& cause) noexcept;
  // The same with the cause of the host's group, if that is aborted; else nothing.
  void close_if_aborted() noexcept;

  // Whether a rank's connections have ended without a word.
  bool has_lost(int peer) const { return mail_.has_lost(peer); }

 private:
  net::Mail::State look_at(const Message& message);
  int wait_to_the_end(const Message& message, const Deadline& deadline, const std::string& call);
  bool is_elsewhere(int peer) const;
  std::string name_of(int peer) const;  // "rank 3 on another host"
  [[noreturn]] void fail(const std::string& why);
  [[noreturn]] void fail_lost(const Message& message, const std::string& call);

  const std::shared_ptr<shm::Group> host_;
  const int rank_;
  const std::vector<int> peers_;
  const std::vector<int> sockets_;
  const std::shared_ptr<ForkGuard> fork_guard_;  // of this process; may be null
  std::atomic<bool> closed_{false};
  net::Mail mail_;
  net::Streams streams_;
};

}  // namespace torchtp::backend
