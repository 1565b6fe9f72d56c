#include "backend/symmetric_memory.h"

#ifdef TORCHTP_CUDA
#include <torch/version.h>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include "core/cuda_memory.h"

static_assert(TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 11 && TORCH_VERSION_MINOR <= 15,
              "torch's symmetric memory is known from 2.11 to 2.15: read its header, then widen this");

namespace torchtp::backend {

namespace symmetric = c10d::symmetric_memory;

namespace {

struct SymmetricArena {
  PinnedMemory fault{sizeof(kernels::HaloFault)};
  at::Tensor mine;
  c10::intrusive_ptr<symmetric::SymmetricMemory> all;  // maps the peers' memory as long as it lives
};

}  // namespace

bool has_symmetric_memory() { return symmetric::has_allocator(c10::kCUDA); }

exchange::ArenaMemory make_symmetric_arena(const std::string& group_name, int device, size_t num_bytes) {
  const auto arena = std::make_shared<SymmetricArena>();
  const auto size = static_cast<int64_t>(num_bytes);
  arena->mine = symmetric::empty_strided_p2p(
      {size}, {1}, at::kByte, c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device)), group_name, std::nullopt);
  arena->all = symmetric::rendezvous(arena->mine, group_name);
  if (!arena->all) throw Error("torch's symmetric memory gave no handle");
  exchange::ArenaMemory memory{{}, num_bytes, static_cast<kernels::HaloFault*>(arena->fault.data()), arena};
  const size_t offset = arena->all->get_offset();
  for (void* base : arena->all->get_buffer_ptrs()) {
    if (base == nullptr) throw Error("a peer's device memory cannot be reached from this device");
    memory.bases.push_back(static_cast<std::byte*>(base) + offset);
  }
  return memory;
}

}  // namespace torchtp::backend
#endif
