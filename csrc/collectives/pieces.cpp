#include "collectives/pieces.h"

#include "core/error.h"

namespace torchtp::collectives {

namespace {

// Every round takes as much of each piece that it concerns, so that all owners work in every round.
class Pieces {
 public:
  Pieces(const Call& call, const shm::Fingerprint& print, const std::vector<Piece>& pieces, c10::ScalarType dtype)
      : group_(call.group), print_(print), pieces_(pieces), dtype_(dtype), item_bytes_(c10::elementSize(dtype)) {
    for (const Piece& piece : pieces_) longest_ = std::max(longest_, bytes_of(piece));
  }

  void reduce(ReduceOp op) {
    std::vector<const std::byte*> inputs(group_.size());
    if (longest_ * pieces_.size() > kSmallBytes) {
      const std::vector<const std::byte*> buffers = announce();
      if (!buffers.empty()) {
        size_t before = 0;
        for (const Piece& piece : pieces_) {
          for (int r = 0; r < group_.size(); ++r) inputs[r] = buffers[r] + before;
          if (piece.owner == group_.rank()) reduce_inputs(piece.output, inputs, piece.count, dtype_, op);
          before += bytes_of(piece);
        }
        group_.round(print_);
        return;
      }
    }
    const size_t part_bytes = fitting(pieces_.size());
    for_each_chunk(longest_, part_bytes, [&](size_t offset, size_t) {
      std::byte* const slot = group_.slot(group_.rank());
      for (size_t i = 0; i < pieces_.size(); ++i) {
        const size_t size = size_at(pieces_[i], offset, part_bytes);
        if (size > 0) stage_bytes(group_, slot + i * part_bytes, pieces_[i].input + offset, size);
      }
      group_.round(print_);
      for (size_t i = 0; i < pieces_.size(); ++i) {
        const size_t size = size_at(pieces_[i], offset, part_bytes);
        if (pieces_[i].owner != group_.rank() || size == 0) continue;
        for (int r = 0; r < group_.size(); ++r) inputs[r] = group_.peer_slot(r) + i * part_bytes;
        reduce_inputs(pieces_[i].output + offset, inputs, static_cast<int64_t>(size / item_bytes_), dtype_, op);
        claim_of_peers(group_, i * part_bytes, size);
      }
    });
  }

  void spread() {
    if (longest_ * pieces_.size() > kSmallBytes) {
      const std::vector<const std::byte*> buffers = announce();
      if (!buffers.empty()) {
        size_t before = 0;
        for (const Piece& piece : pieces_) {
          copy_bytes(piece.output, buffers[piece.owner] + before, bytes_of(piece));
          before += bytes_of(piece);
        }
        group_.round(print_);
        return;
      }
    }
    // Place of each piece among those of its owner, which share the owner's slot.
    std::vector<size_t> place(pieces_.size()), owned(group_.size());
    size_t most = 1;
    for (size_t i = 0; i < pieces_.size(); ++i) {
      place[i] = owned[pieces_[i].owner]++;
      most = std::max(most, owned[pieces_[i].owner]);
    }
    const size_t part_bytes = fitting(most);
    for_each_chunk(longest_, part_bytes, [&](size_t offset, size_t) {
      std::byte* const slot = group_.slot(group_.rank());
      for (size_t i = 0; i < pieces_.size(); ++i) {
        const size_t size = size_at(pieces_[i], offset, part_bytes);
        if (pieces_[i].owner != group_.rank() || size == 0) continue;
        stage_bytes(group_, slot + place[i] * part_bytes, pieces_[i].input + offset, size);
        copy_bytes(pieces_[i].output + offset, pieces_[i].input + offset, size);
      }
      group_.round(print_);
      for (size_t i = 0; i < pieces_.size(); ++i) {
        const size_t size = size_at(pieces_[i], offset, part_bytes);
        if (pieces_[i].owner == group_.rank() || size == 0) continue;
        take_bytes(pieces_[i].output + offset, group_.peer_slot(pieces_[i].owner) + place[i] * part_bytes, size,
                   bytes_of(pieces_[i]), group_.size() == 2);
      }
    });
  }

 private:
  size_t bytes_of(const Piece& piece) const { return piece.count * item_bytes_; }

  size_t size_at(const Piece& piece, size_t offset, size_t part_bytes) const {
    const size_t total = bytes_of(piece);
    return offset < total ? std::min(part_bytes, total - offset) : 0;
  }

  size_t fitting(size_t num_parts) const {
    const size_t part_bytes = align_down(group_.slot_bytes() / num_parts);
    if (part_bytes == 0) {
      throw Error(std::to_string(num_parts) + " pieces do not fit a slot of " + std::to_string(group_.slot_bytes()) +
                  " bytes; make the slots larger");
    }
    return part_bytes;
  }

  // Where the pieces lie on every rank if each rank has them one behind the other in its heap; else nothing.
  std::vector<const std::byte*> announce() {
    size_t total = 0;
    bool one_buffer = true;
    const std::byte* const first = pieces_[0].input;
    for (const Piece& piece : pieces_) {
      one_buffer = one_buffer && (piece.count == 0 || piece.input == first + total);
      total += bytes_of(piece);
    }
    group_.round(print_, one_buffer ? group_.heap_offset(first, total) : -1);
    std::vector<const std::byte*> buffers;
    if (!all_in_heap(group_)) return buffers;
    for (int r = 0; r < group_.size(); ++r) buffers.push_back(group_.peer_heap(r, total));
    return buffers;
  }

  shm::Group& group_;
  const shm::Fingerprint print_;
  const std::vector<Piece>& pieces_;
  const c10::ScalarType dtype_;
  const size_t item_bytes_;
  size_t longest_ = 0;
};

}  // namespace

void reduce_pieces(const Call& call, const shm::Fingerprint& print, const std::vector<Piece>& pieces,
                   c10::ScalarType dtype, ReduceOp op) {
  if (!pieces.empty()) Pieces(call, print, pieces, dtype).reduce(op);
}

void spread_pieces(const Call& call, const shm::Fingerprint& print, const std::vector<Piece>& pieces,
                   c10::ScalarType dtype) {
  if (!pieces.empty()) Pieces(call, print, pieces, dtype).spread();
}

}  // namespace torchtp::collectives
