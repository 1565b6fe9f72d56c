#include "shm/host.h"

#include <sys/stat.h>
#include <unistd.h>

#include <fstream>

#include "core/format.h"

namespace torchtp::shm {

std::string host_identity() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  struct stat network{};
  stat("/proc/self/ns/net", &network);
  return cat(boot, ":", network.st_dev, ":", network.st_ino, ":", geteuid());
}

}  // namespace torchtp::shm
