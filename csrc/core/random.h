#pragma once

#include <cstddef>
#include <string>

namespace torchtp {

// From the kernel, as ranks forked from one parent share the seed of rand(); at most 256 bytes.
std::string random_hex(size_t num_bytes);

}  // namespace torchtp
