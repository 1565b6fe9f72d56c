#pragma once

#include <atomic>
#include <memory>
#include <mutex>

#include "core/fd.h"
#include "core/mapping.h"
#include "shm/layout.h"

namespace torchtp::shm {

// What the ranks agree on; rank 0's count.
struct SegmentSizes {
  int64_t num_ranks = 1;
  int64_t slot_bytes = 0;
  int64_t ring_bytes = 0;
  int64_t mailbox_bytes = 0;
  int64_t heap_bytes = 0;
};

// The memory of one group: an anonymous sealed file, mapped whole. It is sparse: only what is reserved takes memory,
// and it is gone with the last process that has it, however that process ends.
class Segment {
 public:
  explicit Segment(const SegmentSizes& sizes);  // makes the file
  Segment(Fd file, const SegmentSizes& sizes);  // maps the file made by rank 0; checks its seals and size

  const Fd& file() const { return file_; }
  const SegmentSizes& sizes() const { return sizes_; }

  Control& control() const;
  Board& board(int rank) const;
  RingControl& ring_control(Channel channel, int from, int to) const;
  std::byte* ring(Channel channel, int from, int to) const;
  size_t ring_bytes(Channel channel) const;
  std::byte* slot(int parity, int rank) const;
  std::byte* heap(int rank) const;

  // Takes memory for these bytes of the segment now, so that touching them cannot fail later. Throws when there is
  // none, also when taking it would have the kernel kill somebody (core/memory_left.h).
  void reserve(const std::byte* begin, size_t num_bytes) const;
  // Gives whole pages back; they read as zero.
  void release(const std::byte* begin, size_t num_bytes) const noexcept;

 private:
  // Where the parts begin.
  struct Offsets {
    explicit Offsets(const SegmentSizes& sizes);
    size_t boards, ring_controls, slots, rings, mailboxes, heaps, end;
  };
  static Fd make_file(size_t num_bytes);
  void take(const std::byte* begin, size_t num_bytes) const;
  void populate(const std::byte* begin, size_t num_bytes) const noexcept;

  SegmentSizes sizes_;
  Offsets offsets_;
  Fd file_;
  Mapping mapping_;
  mutable std::atomic<size_t> taken_unseen_{0};  // bytes since somebody looked at how much the machine has left
  mutable std::mutex taking_;
};

}  // namespace torchtp::shm
