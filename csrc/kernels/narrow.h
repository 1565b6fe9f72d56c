#pragma once

#include <cstdint>

namespace torchtp::kernels {

// Kernels count extents in 32 bits.
inline int32_t narrow(int64_t value) { return static_cast<int32_t>(value); }

}  // namespace torchtp::kernels
