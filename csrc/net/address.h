#pragma once

#include <sys/socket.h>

#include <string>

#include "core/fd.h"

namespace torchtp::net {

// An address of the internet's protocols with a port, or none.
struct Address {
  sockaddr_storage storage{};
  socklen_t length = 0;

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
  int family() const { return storage.ss_family; }

  std::string text() const;  // "10.0.0.1 4711", "fd00::1 4711"
  static Address parse(const std::string& text);
};

// Where other hosts reach this one: the first interface named in `interfaces` (as in GLOO_SOCKET_IFNAME, separated by
// commas) that has an address; without names what the host's own name says, if it is an address of this host; else
// loopback. The same as gloo's choice.
Address own_address(const std::string& interfaces);

// Bound to `address` (port 0: any that is free) and listening. What it is bound to goes into `address`.
Fd listen_at(Address& address);

}  // namespace torchtp::net
