#pragma once

#include <cstddef>
#include <string>

#include "core/error.h"

namespace torchtp {

// There is no memory of any kind for what was asked.
class OutOfMemory : public Error {
 public:
  using Error::Error;
};

// What keeps this process from taking `num_bytes` of memory more, in words; empty where nothing is known to. Looks at
// the machine and at each cgroup that the process is in. The kernel has no such error: who takes the last of a full
// cgroup, or of a full machine, is killed, and so may be any other process there. What it could write back, drop or
// swap counts as left, so a refusal is never too early. `root` stands before the paths that are read.
std::string lack_of_memory(size_t num_bytes, const std::string& root = "");

}  // namespace torchtp
