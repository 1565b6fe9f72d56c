#pragma once

#include <string>

namespace torchtp::shm {

// Ranks that say the same are on one host, in one network namespace, as one user. (Ranks that do not may be, too: where
// addresses come and go.) No '/' or space inside.
std::string host_identity();

}  // namespace torchtp::shm
