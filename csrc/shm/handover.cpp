#include "shm/handover.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <utility>

#include "core/format.h"
#include "core/random.h"

namespace torchtp::shm {

namespace {

constexpr size_t kTokenLength = 32;
constexpr size_t kMostTaken = (CMSG_SPACE(sizeof(int)) - CMSG_LEN(0)) / sizeof(int);  // room for one is room for two

// A name that starts with a zero byte is in no file system.
socklen_t abstract_address(const std::string& name, sockaddr_un& address) {
  address = {};
  address.sun_family = AF_UNIX;
  const std::string path = "torchtp-" + name;
  path.copy(address.sun_path + 1, sizeof(address.sun_path) - 1);
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + path.size());
}

bool same_user(const Fd& socket) {
  ucred peer{};
  socklen_t length = sizeof(peer);
  return getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 && peer.uid == geteuid();
}

void wait_readable(const Fd& socket, const Deadline& deadline, const char* what) {
  pollfd entry{socket.get(), POLLIN, 0};
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline.left()).count();
    const int found = poll(&entry, 1, static_cast<int>(std::min<int64_t>(left, 3'600'000)));
    if (found > 0) return;
    if (found < 0 && errno != EINTR) throw_errno("poll");
    if (deadline.passed()) throw Error(cat("deadline passed while ", what));
  }
}

// One message: a byte, with the descriptor beside it.
struct DescriptorMessage {
  char byte = 0;
  iovec part{&byte, 1};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr header{};

  DescriptorMessage() {
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    header.msg_control = control.data();
    header.msg_controllen = control.size();
  }
};

void send_descriptor(const Fd& socket, const Fd& file) {
  DescriptorMessage message;
  cmsghdr* const entry = CMSG_FIRSTHDR(&message.header);
  entry->cmsg_level = SOL_SOCKET;
  entry->cmsg_type = SCM_RIGHTS;
  entry->cmsg_len = CMSG_LEN(sizeof(int));
  const int value = file.get();
  std::memcpy(CMSG_DATA(entry), &value, sizeof(value));
  if (sendmsg(socket.get(), &message.header, MSG_NOSIGNAL) == 1) return;
  // Who has died since is missed by all in the next step; the others must not wait for their descriptor until then.
  if (errno != EPIPE && errno != ECONNRESET) throw_errno("cannot hand over the segment");
}

}  // namespace

Handover::Handover()
    : address_(random_hex(kTokenLength / 2) + random_hex(kTokenLength / 2)), socket_(Fd::unix_socket()) {
  sockaddr_un address;
  const socklen_t length = abstract_address(address_.substr(0, kTokenLength), address);
  if (bind(socket_.get(), reinterpret_cast<sockaddr*>(&address), length) != 0) throw_errno("cannot bind a UNIX socket");
  if (listen(socket_.get(), 1024) != 0) throw_errno("cannot listen on a UNIX socket");
}

void Handover::serve(const Fd& file, int count, const Deadline& deadline) {
  const std::string token = address_.substr(kTokenLength);
  const Fd door(std::move(socket_));  // closed also where this fails: who still waits at it then knows
  while (count > 0) {
    wait_readable(door, deadline, "handing the segment to the other ranks");
    const Fd peer = Fd::accept(door);
    if (!peer && errno != EINTR && errno != EAGAIN && errno != ECONNABORTED) throw_errno("cannot let a rank in");
    if (!peer) continue;
    std::array<char, kTokenLength> greeting{};
    // Receivers have greeted before we come here: a caller without a greeting is a stranger and must not hold us up.
    const ssize_t got = recv(peer.get(), greeting.data(), greeting.size(), MSG_DONTWAIT);
    if (got != static_cast<ssize_t>(kTokenLength) || !same_user(peer)) continue;
    if (token.compare(0, kTokenLength, greeting.data(), kTokenLength) != 0) continue;
    send_descriptor(peer, file);
    --count;
  }
}

Receiver::Receiver(const std::string& address, Fd socket) : socket_(std::move(socket)) {
  if (address.size() != 2 * kTokenLength) throw Error("rank 0 gave no address to fetch the segment from");
  sockaddr_un name;
  const socklen_t length = abstract_address(address.substr(0, kTokenLength), name);
  const timeval limit{30, 0};  // connecting waits only when rank 0's queue is full
  setsockopt(socket_.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
  if (connect(socket_.get(), reinterpret_cast<sockaddr*>(&name), length) != 0) {
    throw_errno("cannot reach rank 0 over a UNIX socket (ranks of a group must share host and network namespace)");
  }
  if (!same_user(socket_)) throw Error("the segment is offered by a process of another user");
  if (send(socket_.get(), address.data() + kTokenLength, kTokenLength, MSG_NOSIGNAL) !=
      static_cast<ssize_t>(kTokenLength)) {
    throw_errno("cannot greet rank 0");
  }
}

Fd Receiver::receive(const Deadline& deadline) {
  wait_readable(socket_, deadline, "waiting for the segment from rank 0");
  DescriptorMessage message;
  const ssize_t got = recvmsg(socket_.get(), &message.header, MSG_CMSG_CLOEXEC);
  std::array<Fd, kMostTaken> taken;  // whatever has come is closed where it is not what was awaited
  const cmsghdr* const entry = got == 1 ? CMSG_FIRSTHDR(&message.header) : nullptr;
  const bool has_any = entry && entry->cmsg_level == SOL_SOCKET && entry->cmsg_type == SCM_RIGHTS;
  const size_t count = has_any ? (entry->cmsg_len - CMSG_LEN(0)) / sizeof(int) : 0;
  for (size_t i = 0; i < std::min(count, kMostTaken); ++i) {
    int value = -1;
    std::memcpy(&value, CMSG_DATA(entry) + i * sizeof(value), sizeof(value));
    taken[i] = Fd(value);
  }
  if (got == 1 && count == 0 && (message.header.msg_flags & MSG_CTRUNC) != 0) {
    throw Error("it has no descriptor left to take the segment with (ulimit -n)");
  }
  if (count > 1) throw Error("rank 0 handed over more than the segment");
  if (count == 0) throw Error("rank 0 hung up instead of handing over the segment");
  return std::move(taken[0]);
}

}  // namespace torchtp::shm
