#pragma once

#ifdef TORCHTP_CUDA
#include <string>

#include "exchange/arena_exchange.h"

namespace torchtp::backend {

// torch's symmetric memory: memory of a device that the other ranks' devices can read and write. A private interface of
// torch, used here and nowhere else; the same in torch 2.11 to 2.15.
bool has_symmetric_memory();

// Collective over the group's store. Throws what torch throws where a device cannot see a peer's memory.
exchange::ArenaMemory make_symmetric_arena(const std::string& group_name, int device, size_t num_bytes);

}  // namespace torchtp::backend
#endif
