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
  std::string told;
  try {
    memory.num_bytes = size();
    const auto arena = std::make_shared<HostArena>(group, memory.num_bytes);
    memory.fault = &arena->fault;
    memory.owner = arena;
    told = cat(memory.num_bytes, " ", group->heap_offset(arena->mine, memory.num_bytes));
  } catch (const std::exception& error) {
    told = cat("0 ", error.what());  // for all ranks, which wait for this one
  }
  const auto all = bootstrap.all_gather(told);
  const auto bytes_of = [&](int rank) { return all[rank].substr(0, all[rank].find(' ')); };
  const auto rest_of = [&](int rank) { return all[rank].substr(all[rank].find(' ') + 1); };
  for (int rank = 0; rank < group->size(); ++rank) {
    if (bytes_of(rank) == "0") throw Error(cat("rank ", rank, " has no memory for halos: ", rest_of(rank)));
  }
  for (int rank = 0; rank < group->size(); ++rank) {
    if (bytes_of(rank) != bytes_of(0)) {
      throw Error(cat("TORCHTP_ARENA_BYTES must be the same on all ranks: rank 0 has memory of ", bytes_of(0),
                      " bytes for halos, rank ", rank, " of ", bytes_of(rank)));
    }
    memory.bases.push_back(group->heap(rank) + std::stoll(rest_of(rank)));
  }
  return memory;
}

}  // namespace torchtp::backend
