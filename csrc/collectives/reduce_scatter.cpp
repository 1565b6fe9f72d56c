#include "collectives/reduce_scatter.h"

namespace torchtp::collectives {

namespace {

bool is_one_buffer(const std::vector<const std::byte*>& inputs, size_t num_bytes) {
  for (size_t r = 1; r < inputs.size(); ++r) {
    if (inputs[r] != inputs[0] + r * num_bytes) return false;
  }
  return true;
}

}  // namespace

void reduce_scatter(const Call& call, const std::vector<const std::byte*>& inputs, std::byte* output, int64_t count,
                    c10::ScalarType dtype, ReduceOp op) {
  shm::Group& group = call.group;
  const int rank = group.rank();
  const int num_ranks = group.size();
  const size_t item_bytes = c10::elementSize(dtype);
  const size_t num_bytes = count * item_bytes;
  const shm::Fingerprint print = call.fingerprint(Kind::kReduceScatter, count, dtype, op);
  std::vector<const std::byte*> sources(num_ranks);
  if (num_bytes * num_ranks > kSmallBytes) {
    const bool one_buffer = is_one_buffer(inputs, num_bytes);
    group.round(print, one_buffer ? group.heap_offset(inputs[0], num_bytes * num_ranks) : -1);
    if (all_in_heap(group)) {
      for (int r = 0; r < num_ranks; ++r) sources[r] = group.peer_heap(r, num_bytes * num_ranks) + rank * num_bytes;
      reduce_inputs(output, sources, count, dtype, op);
      group.round(print);
      return;
    }
  }
  const size_t piece_bytes = align_down(group.slot_bytes() / num_ranks);
  for_each_chunk(num_bytes, piece_bytes, [&](size_t offset, size_t size) {
    std::byte* slot = group.slot(rank);
    for (int r = 0; r < num_ranks; ++r) {
      if (r != rank) stage_bytes(group, slot + r * piece_bytes, inputs[r] + offset, size);
    }
    group.round(print);
    for (int r = 0; r < num_ranks; ++r) {
      sources[r] = r == rank ? inputs[r] + offset : group.peer_slot(r) + rank * piece_bytes;
    }
    reduce_inputs(output + offset, sources, static_cast<int64_t>(size / item_bytes), dtype, op);
    claim_of_peers(group, rank * piece_bytes, size);
  });
}

}  // namespace torchtp::collectives
