#include "collectives/scatter.h"

namespace torchtp::collectives {

void scatter(const Call& call, const std::vector<const std::byte*>& inputs, std::byte* output, int64_t count,
             c10::ScalarType dtype, int root) {
  shm::Group& group = call.group;
  const int rank = group.rank();
  const size_t num_bytes = count * c10::elementSize(dtype);
  const shm::Fingerprint print = call.fingerprint(Kind::kScatter, count, dtype, root);
  const size_t piece_bytes = align_down(group.slot_bytes() / group.size());
  if (rank == root) copy_bytes(output, inputs[root], num_bytes);
  for_each_chunk(num_bytes, piece_bytes, [&](size_t offset, size_t size) {
    if (rank == root) {
      for (int r = 0; r < group.size(); ++r) {
        if (r != root) stage_bytes(group, group.slot(root) + r * piece_bytes, inputs[r] + offset, size);
      }
    }
    group.round(print);
    if (rank != root) take_bytes(output + offset, group.peer_slot(root) + rank * piece_bytes, size, num_bytes, true);
  });
}

}  // namespace torchtp::collectives
