#include "collectives/alltoall.h"

#include "core/error.h"

namespace torchtp::collectives {

namespace {

// A slot begins with the sizes of its rank: to each rank, then from each rank; the pieces follow, one for each rank.
struct SlotLayout {
  SlotLayout(size_t slot_bytes, size_t num_ranks)
      : pieces((2 * num_ranks * sizeof(uint64_t) + kAlignment - 1) / kAlignment * kAlignment),
        piece_bytes(slot_bytes > pieces ? align_down((slot_bytes - pieces) / num_ranks) : 0) {
    if (piece_bytes == 0) {
      throw Error("alltoall of " + std::to_string(num_ranks) + " ranks does not fit slots of " +
                  std::to_string(slot_bytes) + " bytes; make the slots larger");
    }
  }
  size_t pieces;
  size_t piece_bytes;
};

uint64_t size_in(const std::byte* slot, size_t index) {
  uint64_t value;
  std::memcpy(&value, slot + index * sizeof(value), sizeof(value));
  return value;
}

// The longest message between two ranks, after a check that all senders and receivers agree. It decides how many rounds
// all make, so each rank puts in its own sizes as it knows them: what stands in its slot another may have written over.
size_t agree_on_longest(const shm::Group& group, const std::vector<size_t>& send_bytes,
                        const std::vector<size_t>& receive_bytes) {
  const int num_ranks = group.size(), rank = group.rank();
  size_t longest = 0;
  for (int s = 0; s < num_ranks; ++s) {
    for (int d = 0; d < num_ranks; ++d) {
      const uint64_t sent = s == rank ? send_bytes[d] : size_in(group.peer_slot(s), d);
      const uint64_t expected = d == rank ? receive_bytes[s] : size_in(group.peer_slot(d), num_ranks + s);
      if (sent != expected) {
        throw Error("alltoall: rank " + std::to_string(s) + " sends " + std::to_string(sent) + " bytes to rank " +
                    std::to_string(d) + ", which expects " + std::to_string(expected) +
                    "; the split sizes of both must agree");
      }
      if (s != d) longest = std::max<size_t>(longest, sent);
    }
  }
  return longest;
}

}  // namespace

void alltoall(const Call& call, const std::vector<const std::byte*>& inputs, const std::vector<size_t>& send_bytes,
              const std::vector<std::byte*>& outputs, const std::vector<size_t>& receive_bytes, c10::ScalarType dtype) {
  shm::Group& group = call.group;
  const int rank = group.rank();
  const int num_ranks = group.size();
  const SlotLayout layout(group.slot_bytes(), num_ranks);
  const shm::Fingerprint print = call.fingerprint(Kind::kAlltoall, 0, dtype);
  const auto size_at = [&](size_t total, size_t offset) {
    return offset < total ? std::min(layout.piece_bytes, total - offset) : 0;
  };
  size_t longest = 0;
  size_t offset = 0;
  do {
    std::byte* slot = group.slot(rank);
    if (offset == 0) {
      for (int r = 0; r < num_ranks; ++r) {
        const uint64_t sizes[2] = {send_bytes[r], receive_bytes[r]};
        std::memcpy(slot + r * sizeof(uint64_t), &sizes[0], sizeof(uint64_t));
        std::memcpy(slot + (num_ranks + r) * sizeof(uint64_t), &sizes[1], sizeof(uint64_t));
      }
    }
    for (int r = 0; r < num_ranks; ++r) {
      if (r == rank) continue;
      stage_bytes(group, slot + layout.pieces + r * layout.piece_bytes, inputs[r] + offset,
                  size_at(send_bytes[r], offset));
    }
    group.round(print);
    if (offset == 0) {
      longest = agree_on_longest(group, send_bytes, receive_bytes);
      copy_bytes(outputs[rank], inputs[rank], send_bytes[rank]);
    }
    for (int r = 0; r < num_ranks; ++r) {
      if (r == rank) continue;
      take_bytes(outputs[r] + offset, group.peer_slot(r) + layout.pieces + rank * layout.piece_bytes,
                 size_at(receive_bytes[r], offset), receive_bytes[r] * num_ranks, true);
    }
    offset += layout.piece_bytes;
  } while (offset < longest);
}

}  // namespace torchtp::collectives
