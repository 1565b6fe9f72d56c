#pragma once

#include <string>

namespace torchtp::shm {

// Equal strings on two ranks mean that they can share memory: same running kernel, same network namespace (abstract
// sockets end there), same user.
std::string host_identity();

}  // namespace torchtp::shm
