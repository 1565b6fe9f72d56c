#include "net/address.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <memory>
#include <sstream>

#include "core/format.h"

namespace torchtp::net {
namespace {

bool is_usable(const sockaddr* address) {
  if (address == nullptr) return false;
  if (address->sa_family == AF_INET) return true;
  return address->sa_family == AF_INET6 &&
         !IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr);  // means nothing elsewhere
}

Address copy_of(const sockaddr* address) {
  Address copy;
  copy.length = address->sa_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
  std::memcpy(&copy.storage, address, copy.length);
  return copy;
}

Address of_interface(const std::string& name) {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) throw_errno("cannot list the network interfaces");
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(list, freeifaddrs);
  for (const ifaddrs* each = list; each != nullptr; each = each->ifa_next) {
    if (name == each->ifa_name && (each->ifa_flags & IFF_UP) && is_usable(each->ifa_addr)) {
      return copy_of(each->ifa_addr);
    }
  }
  return {};
}

bool can_bind(const Address& address) {
  const Fd socket = Fd::tcp_socket(address.family());
  return bind(socket.get(), address.get(), address.length) == 0;
}

Address of_host_name() {
  std::array<char, 256> name{};
  if (gethostname(name.data(), name.size() - 1) != 0) return {};
  addrinfo hints{}, *list = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  if (getaddrinfo(name.data(), nullptr, &hints, &list) != 0) return {};
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(list, freeaddrinfo);
  for (const addrinfo* each = list; each != nullptr; each = each->ai_next) {
    if (!is_usable(each->ai_addr)) continue;
    const Address address = copy_of(each->ai_addr);
    if (can_bind(address)) return address;
  }
  return {};
}

Address loopback() {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return copy_of(reinterpret_cast<const sockaddr*>(&address));
}

}  // namespace

std::string Address::text() const {
  std::array<char, NI_MAXHOST> host{};
  std::array<char, NI_MAXSERV> port{};
  const int failed =
      getnameinfo(get(), length, host.data(), host.size(), port.data(), port.size(), NI_NUMERICHOST | NI_NUMERICSERV);
  return failed != 0 ? "no address" : cat(host.data(), " ", port.data());
}

Address Address::parse(const std::string& text) {
  std::string host, port;
  std::istringstream(text) >> host >> port;
  addrinfo hints{}, *list = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  if (getaddrinfo(host.c_str(), port.c_str(), &hints, &list) != 0) {
    throw Error(cat("'", text, "' is not a numeric address and a port"));
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(list, freeaddrinfo);
  return copy_of(list->ai_addr);
}

Address own_address(const std::string& interfaces) {
  std::istringstream names(interfaces);
  for (std::string name; std::getline(names, name, ',');) {
    const Address address = of_interface(name);
    if (address.length > 0) return address;
  }
  if (!interfaces.empty()) {
    throw Error(cat("GLOO_SOCKET_IFNAME='", interfaces,
                    "' names no network interface of this host with an address that other hosts can use (a link-local "
                    "one, fe80::, is none)"));
  }
  const Address address = of_host_name();
  return address.length > 0 ? address : loopback();
}

Fd listen_at(Address& address) {
  Fd socket = Fd::tcp_socket(address.family());
  if (bind(socket.get(), address.get(), address.length) != 0 || listen(socket.get(), SOMAXCONN) != 0) {
    throw_errno("cannot listen at ", address.text());
  }
  address.length = sizeof(address.storage);
  if (getsockname(socket.get(), address.get(), &address.length) != 0) throw_errno("getsockname");
  return socket;
}

}  // namespace torchtp::net
