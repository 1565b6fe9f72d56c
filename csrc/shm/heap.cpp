#include "shm/heap.h"

#include <algorithm>
#include <functional>

#include "core/format.h"

namespace torchtp::shm {

namespace {

constexpr size_t kSmallAlignment = 64;
constexpr size_t kLargeBytes = size_t{64} << 10;
constexpr size_t kRetainedBytes = size_t{64} << 20;

size_t round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

}  // namespace

Heap::Heap(std::shared_ptr<Segment> segment, int rank)
    : segment_(std::move(segment)), base_(segment_->heap(rank)), num_bytes_(segment_->sizes().heap_bytes) {
  add_free(0, num_bytes_);
}

std::byte* Heap::allocate(size_t num_bytes) {
  const size_t alignment = num_bytes >= kLargeBytes ? kPage : kSmallAlignment;
  std::lock_guard<std::mutex> lock(mutex_);
  if (num_bytes <= num_bytes_) {
    const size_t wanted = round_up(std::max<size_t>(num_bytes, 1), alignment);
    for (auto it = free_by_size_.lower_bound({wanted, 0}); it != free_by_size_.end(); ++it) {
      const auto [bytes, offset] = *it;
      const size_t begin = round_up(offset, alignment);
      if (begin + wanted > offset + bytes) continue;
      reserve(begin, wanted);
      remove_free(offset, bytes);
      if (begin > offset) add_free(offset, begin - offset);
      if (begin + wanted < offset + bytes) add_free(begin + wanted, offset + bytes - begin - wanted);
      blocks_[begin] = wanted;
      allocated_ += wanted;
      return base_ + begin;
    }
  }
  throw Error(cat("the shared heap is full: ", num_bytes, " bytes wanted, ", allocated_, " of ", num_bytes_,
                  " bytes in use; set TORCHTP_HEAP_BYTES to more"));
}

void Heap::free(std::byte* pointer) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto block = blocks_.find(static_cast<size_t>(pointer - base_));
  if (block == blocks_.end()) throw Error("this pointer was not allocated from the shared heap of this rank");
  size_t offset = block->first, bytes = block->second;
  blocks_.erase(block);
  allocated_ -= bytes;
  const auto next = free_.lower_bound(offset);
  if (next != free_.end() && next->first == offset + bytes) {
    bytes += next->second;
    remove_free(next->first, next->second);
  }
  const auto after = free_.lower_bound(offset);
  if (after != free_.begin()) {
    const auto [before, before_bytes] = *std::prev(after);
    if (before + before_bytes == offset) {
      remove_free(before, before_bytes);
      offset = before;
      bytes += before_bytes;
    }
  }
  add_free(offset, bytes);
  if (num_reserved_ * kPage > allocated_ + kRetainedBytes) give_back();
}

bool Heap::owns(const void* pointer, size_t num_bytes) const {
  // std::less: the pointers may be unrelated.
  const auto* const begin = static_cast<const std::byte*>(pointer);
  if (std::less<const std::byte*>()(begin, base_) || std::less<const std::byte*>()(base_ + num_bytes_, begin)) {
    return false;
  }
  return num_bytes <= num_bytes_ - static_cast<size_t>(begin - base_);
}

size_t Heap::allocated_bytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return allocated_;
}

void Heap::add_free(size_t offset, size_t num_bytes) {
  free_[offset] = num_bytes;
  free_by_size_.insert({num_bytes, offset});
}

void Heap::remove_free(size_t offset, size_t num_bytes) {
  free_.erase(offset);
  free_by_size_.erase({num_bytes, offset});
}

void Heap::reserve(size_t offset, size_t num_bytes) {
  const size_t end = round_up(offset + num_bytes, kPage) / kPage;
  if (reserved_.size() < end) reserved_.resize(end);
  for (size_t page = offset / kPage; page < end; ++page) {
    if (reserved_[page]) continue;
    size_t last = page;
    while (last < end && !reserved_[last]) ++last;
    segment_->reserve(base_ + page * kPage, (last - page) * kPage);
    std::fill(reserved_.begin() + page, reserved_.begin() + last, true);
    num_reserved_ += last - page;
    page = last;
  }
}

void Heap::give_back() {
  for (const auto& [offset, bytes] : free_) {
    const size_t first = round_up(offset, kPage) / kPage;
    const size_t end = std::min((offset + bytes) / kPage, reserved_.size());
    if (first >= end) continue;
    segment_->release(base_ + first * kPage, (end - first) * kPage);
    num_reserved_ -= std::count(reserved_.begin() + first, reserved_.begin() + end, true);
    std::fill(reserved_.begin() + first, reserved_.begin() + end, false);
  }
}

}  // namespace torchtp::shm
