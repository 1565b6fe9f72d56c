#include "backend/host_arena.h"

#include <string>

#include "core/error.h"
#include "core/format.h"

namespace torchtp::backend {
namespace {

struct HostArena {
  std::shared_ptr<shm::Group> group;
  std::byte* mine;
  kernels::HaloFault fault{};

  HostArena(std::shared_ptr<shm::Group> shared, size_t num_bytes)
      : group(std::move(shared)), mine(group->allocate(num_bytes)) {}
  ~HostArena() { group->free(mine); }
  HostArena(const HostArena&) = delete;
  HostArena& operator=(const HostArena&) = delete;
};

}  // namespace

exchange::ArenaMemory make_host_arena(const std::shared_ptr<shm::Group>& group, shm::Bootstrap& bootstrap,
                                      const std::function<size_t()>& size) {
  exchange::ArenaMemory memory;
  const auto all = shm::together(bootstrap, "has no memory for halos", [&] {
    memory.num_bytes = size();
    const auto arena = std::make_shared<HostArena>(group, memory.num_bytes);
    memory.fault = &arena->fault;
    memory.owner = arena;
    return cat(memory.num_bytes, " ", group->heap_offset(arena->mine, memory.num_bytes));
  });
  const auto expected = std::stoull(all[0]);
  for (int rank = 0; rank < group->size(); ++rank) {
    size_t end = 0;
    const auto num_bytes = std::stoull(all[rank], &end);
    if (num_bytes != expected) {
      throw Error(cat("TORCHTP_ARENA_BYTES must be the same on all ranks: rank 0 has memory of ", expected,
                      " bytes for halos, rank ", rank, " of ", num_bytes));
    }
    memory.bases.push_back(group->heap(rank) + std::stoll(all[rank].substr(end)));
  }
  return memory;
}

}  // namespace torchtp::backend
