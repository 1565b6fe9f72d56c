#pragma once

#include "collectives/call.h"

namespace torchtp::collectives {

// Copies `data` of `root` to `data` of the others: in chunks, the next one staged while the last one is read, or
// straight out of the heap of `root`.
void broadcast(const Call& call, std::byte* data, int64_t count, c10::ScalarType dtype, int root);

}  // namespace torchtp::collectives
