#include "shm/host.h"

#include <ifaddrs.h>
#include <netdb.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <functional>
#include <memory>
#include <set>

#include "core/format.h"

namespace torchtp::shm {

namespace {

// Virtual machines that continue from one snapshot have one boot id, but machines that can reach each other have
// addresses of their own.
size_t hash_of_addresses() {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return 0;
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(list, freeifaddrs);
  std::set<std::string> addresses;
  for (const ifaddrs* each = list; each != nullptr; each = each->ifa_next) {
    const int family = each->ifa_addr ? each->ifa_addr->sa_family : AF_UNSPEC;
    if (family != AF_INET && family != AF_INET6) continue;
    const socklen_t length = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    char text[NI_MAXHOST];
    if (getnameinfo(each->ifa_addr, length, text, sizeof(text), nullptr, 0, NI_NUMERICHOST) == 0) {
      addresses.insert(text);
    }
  }
  std::string all;
  for (const std::string& address : addresses) all += address + " ";
  return std::hash<std::string>()(all);
}

}  // namespace

std::string host_identity() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  struct stat network{};
  stat("/proc/self/ns/net", &network);
  return cat(boot, ":", network.st_dev, ":", network.st_ino, ":", hash_of_addresses(), ":", geteuid());
}

}  // namespace torchtp::shm
