#include "collectives/broadcast.h"

namespace torchtp::collectives {

namespace {

// Up to here who receives reads the root's heap; beyond, that is slower than a copy through the slots, since the root's
// caches hold the newest bytes and give them up line by line.
constexpr size_t kMostInPlace = size_t{2} << 20;

}  // namespace

void broadcast(const Call& call, std::byte* data, int64_t count, c10::ScalarType dtype, int root) {
  shm::Group& group = call.group;
  const bool is_root = group.rank() == root;
  const size_t num_bytes = count * c10::elementSize(dtype);
  const shm::Fingerprint print = call.fingerprint(Kind::kBroadcast, count, dtype, root);
  if (num_bytes > kSmallBytes && num_bytes <= kMostInPlace) {
    group.round(print, is_root ? group.heap_offset(data, num_bytes) : -1);
    if (group.peer_heap_offset(root) >= 0) {
      if (!is_root) copy_bytes(data, group.peer_heap(root, num_bytes), num_bytes);
      group.round(print);
      return;
    }
  }
  for_each_chunk(num_bytes, align_down(group.slot_bytes()), [&](size_t offset, size_t size) {
    if (is_root) stage_bytes(group, group.slot(root), data + offset, size);
    group.round(print);
    if (!is_root) take_bytes(data + offset, group.peer_slot(root), size, num_bytes, group.size() == 2);
  });
}

}  // namespace torchtp::collectives
