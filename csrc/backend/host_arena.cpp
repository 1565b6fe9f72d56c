#include "backend/host_arena.h"

#include <cstring>

namespace torchtp::backend {
namespace {

struct HostArena {
  std::shared_ptr<shm::Group> group;
  std::byte* mine;
  kernels::HaloFault fault;

  HostArena(std::shared_ptr<shm::Group> shared, size_t num_bytes)
      : group(std::move(shared)), mine(group->allocate(num_bytes)) {}
  ~HostArena() { group->free(mine); }
  HostArena(const HostArena&) = delete;
  HostArena& operator=(const HostArena&) = delete;
};

}  // namespace

exchange::ArenaMemory make_host_arena(const std::shared_ptr<shm::Group>& group, shm::Bootstrap& bootstrap,
                                      size_t num_bytes) {
  const auto arena = std::make_shared<HostArena>(group, num_bytes);
  exchange::ArenaMemory memory{{}, num_bytes, &arena->fault, arena};
  const int64_t mine = group->heap_offset(arena->mine, num_bytes);
  const auto offsets = bootstrap.all_gather(std::to_string(mine));
  for (int rank = 0; rank < group->size(); ++rank)
    memory.bases.push_back(group->heap(rank) + std::stoll(offsets[rank]));
  return memory;
}

}  // namespace torchtp::backend
