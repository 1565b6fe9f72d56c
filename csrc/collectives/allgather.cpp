#include "collectives/allgather.h"

namespace torchtp::collectives {

void allgather(const Call& call, const std::byte* input, const std::vector<std::byte*>& outputs, int64_t count,
               c10::ScalarType dtype) {
  shm::Group& group = call.group;
  const int rank = group.rank();
  const size_t num_bytes = count * c10::elementSize(dtype);
  const shm::Fingerprint print = call.fingerprint(Kind::kAllgather, count, dtype);
  copy_bytes(outputs[rank], input, num_bytes);
  if (num_bytes > kSmallBytes) {
    group.round(print, group.heap_offset(input, num_bytes));
    if (all_in_heap(group)) {
      for (int r = 0; r < group.size(); ++r) {
        if (r != rank) copy_bytes(outputs[r], group.peer_heap(r, num_bytes), num_bytes);
      }
      group.round(print);
      return;
    }
  }
  for_each_chunk(num_bytes, align_down(group.slot_bytes()), [&](size_t offset, size_t size) {
    stage_bytes(group, group.slot(rank), input + offset, size);
    group.round(print);
    for (int r = 0; r < group.size(); ++r) {
      if (r == rank) continue;
      take_bytes(outputs[r] + offset, group.peer_slot(r), size, num_bytes * group.size(), group.size() == 2);
    }
  });
}

}  // namespace torchtp::collectives
