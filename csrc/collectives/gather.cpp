#include "collectives/gather.h"

namespace torchtp::collectives {

void gather(const Call& call, const std::byte* input, const std::vector<std::byte*>& outputs, int64_t count,
            c10::ScalarType dtype, int root) {
  shm::Group& group = call.group;
  const int rank = group.rank();
  const size_t num_bytes = count * c10::elementSize(dtype);
  const shm::Fingerprint print = call.fingerprint(Kind::kGather, count, dtype, root);
  if (rank == root) copy_bytes(outputs[root], input, num_bytes);
  for_each_chunk(num_bytes, align_down(group.slot_bytes()), [&](size_t offset, size_t size) {
    if (rank != root) stage_bytes(group, group.slot(rank), input + offset, size);
    group.round(print);
    if (rank != root) return;
    for (int r = 0; r < group.size(); ++r) {
      if (r != root) take_bytes(outputs[r] + offset, group.peer_slot(r), size, num_bytes, true);
    }
  });
}

}  // namespace torchtp::collectives
