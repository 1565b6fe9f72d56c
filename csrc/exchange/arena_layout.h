#pragma once

#include <cstddef>
#include <string>

#include "core/error.h"
#include "kernels/halo_exchange.h"

namespace torchtp::exchange {

// Where things lie in an arena, alike on every rank: words first (NOTE [slots] of kernels/halo_exchange.h), then from
// each other rank two slots for messages in one part and two smaller ones for parts of larger messages, used
// alternately. They are apart so that parts can flow while a whole message stays in its slot.
class ArenaLayout {
 public:
  static constexpr int kSlots = 4;
  enum Word { kSent, kArrived, kTaken, kFree, kNumWords };

  ArenaLayout(int size, size_t num_bytes) : size_(static_cast<size_t>(size)) {
    const size_t head = (words() + size_ * kSlots * kNumWords * sizeof(kernels::HaloWord) + 4095) / 4096 * 4096;
    const size_t each = num_bytes > head ? (num_bytes - head) / (size > 1 ? size_ - 1 : 1) : 0;
    part_ = each / 10 / 256 * 256;
    whole_ = 4 * part_;
    head_ = head;
    if (part_ < 256) {
      throw Error("an arena of " + std::to_string(num_bytes) + " bytes is too small for " + std::to_string(size) +
                  " ranks: it needs " + std::to_string(head + (size_ - 1) * 2560));
    }
  }

  size_t head_bytes() const { return head_; }
  size_t slot_bytes(int slot) const { return slot < 2 ? whole_ : part_; }
  size_t left(int rank) const { return sizeof(kernels::HaloControl) + static_cast<size_t>(rank) * kLine; }
  size_t table() const { return left(static_cast<int>(size_)); }
  size_t word(int peer, int slot, Word word) const {
    return words() + ((static_cast<size_t>(peer) * kSlots + slot) * kNumWords + word) * kLine;
  }
  // In the arena of `owner`.
  size_t slot(int owner, int peer, int slot) const {
    const auto index = static_cast<size_t>(peer < owner ? peer : peer - 1);
    return head_ + index * 2 * (whole_ + part_) + (slot < 2 ? slot * whole_ : 2 * whole_ + (slot - 2) * part_);
  }

 private:
  static constexpr size_t kLine = sizeof(kernels::HaloWord);
  size_t words() const { return (table() + size_ * sizeof(void*) + kLine - 1) / kLine * kLine; }

  size_t size_, head_ = 0, whole_ = 0, part_ = 0;
};

}  // namespace torchtp::exchange
