#pragma once

#include <cstddef>
#include <functional>
#include <memory>

#include "exchange/arena_exchange.h"
#include "shm/group.h"

namespace torchtp::backend {

// An arena a rank in the memory that the ranks of one host share: what devices with peer memory do, for tensors of the
// CPU. Collective; a `size` that throws or differs is the error of all.
exchange::ArenaMemory make_host_arena(const std::shared_ptr<shm::Group>& group, shm::Bootstrap& bootstrap,
                                      const std::function<size_t()>& size);

}  // namespace torchtp::backend
