#pragma once

#include <vector>

#include "collectives/call.h"

namespace torchtp::collectives {

// Rank s sends send_bytes[d] bytes from inputs[d] to rank d, which expects receive_bytes[s] of them in outputs[s].
// Throws Error on every rank if a sender and a receiver disagree about a size.
void alltoall(const Call& call, const std::vector<const std::byte*>& inputs, const std::vector<size_t>& send_bytes,
              const std::vector<std::byte*>& outputs, const std::vector<size_t>& receive_bytes, c10::ScalarType dtype);

}  // namespace torchtp::collectives
