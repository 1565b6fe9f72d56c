#include "shm/ring.h"

#include <algorithm>

#include "core/format.h"

namespace torchtp::shm {

namespace {

constexpr size_t kReserveBytes = size_t{256} << 10;
// So far small messages walk before they start over: to see where the reader is fetches a line from its
// cache. An exchange of 1 KB takes 0.24 us instead of 0.29.
constexpr size_t kWalkBytes = size_t{8} << 10;

[[noreturn]] void damaged() { throw Error("a ring in shared memory is damaged: its positions contradict each other"); }

}  // namespace

RingWriter::RingWriter(std::shared_ptr<Segment> segment, Channel channel, int from, int to)
    : segment_(std::move(segment)),
      control_(&segment_->ring_control(channel, from, to)),
      data_(segment_->ring(channel, from, to)),
      size_(segment_->ring_bytes(channel)),
      head_(control_->head.load()),
      tail_(control_->tail.load()),
      restarted_at_(control_->restart_at.load()) {
  if (head_ % kRingUnit != 0 || tail_ % kRingUnit != 0 || tail_ > head_ || head_ - tail_ > size_) damaged();
}

void RingWriter::begin_message(size_t num_bytes) {
  const uint64_t place = head_ % size_;
  if (place < kWalkBytes) return;
  const uint64_t tail = control_->tail.load(std::memory_order_acquire);
  if (tail % kRingUnit != 0) damaged();
  const uint64_t unread = head_ - tail;
  if (tail < restarted_at_ || (unread != 0 && (unread > place || num_bytes > place - unread))) return;
  control_->restart_from.store(head_, std::memory_order_relaxed);
  head_ += size_ - place;
  tail_ = unread == 0 ? head_ : tail;
  restarted_at_ = head_;
  control_->restart_at.store(head_, std::memory_order_relaxed);
}

std::byte* RingWriter::room(size_t& num_bytes) {
  const size_t wanted = (num_bytes + kRingUnit - 1) / kRingUnit * kRingUnit;
  if (size_ - (head_ - tail_) < wanted) {
    const uint64_t tail = control_->tail.load();
    // Right after a restart the reader's tail is still the one before it.
    if (tail > head_ || head_ - tail >= 2 * size_ || tail % kRingUnit != 0) damaged();
    tail_ = std::max(tail_, tail);
  }
  const size_t place = head_ % size_;
  num_bytes = std::min<size_t>({wanted, size_ - (head_ - tail_), size_ - place});
  reserve(place + num_bytes);
  return data_ + place;
}

void RingWriter::publish(size_t num_bytes) {
  head_ += num_bytes;
  control_->head.store(head_);
}

void RingWriter::reserve(size_t end) {
  if (end <= reserved_) return;
  const size_t wanted = std::min(size_, std::max({end, 2 * reserved_, kReserveBytes}));
  segment_->reserve(data_ + reserved_, wanted - reserved_);
  reserved_ = wanted;
}

RingReader::RingReader(std::shared_ptr<Segment> segment, Channel channel, int from, int to)
    : segment_(std::move(segment)),
      control_(&segment_->ring_control(channel, from, to)),
      data_(segment_->ring(channel, from, to)),
      size_(segment_->ring_bytes(channel)),
      head_(control_->tail.load()),
      tail_(head_) {
  if (tail_ % kRingUnit != 0) damaged();
}

std::byte* RingReader::news(size_t& num_bytes) {
  if (head_ == tail_) head_ = control_->head.load();
  const uint64_t end = head_ == tail_ ? tail_ : end_of_lap();
  const size_t place = tail_ % size_;
  num_bytes = std::min<size_t>(end - tail_, size_ - place);
  return data_ + place;
}

// How far what has come can be read before the writer started over, if it did; goes with it there.
uint64_t RingReader::end_of_lap() {
  const uint64_t from = control_->restart_from.load(std::memory_order_relaxed);
  const uint64_t at = control_->restart_at.load(std::memory_order_relaxed);
  if (head_ < tail_ || head_ % kRingUnit != 0) damaged();
  if (from < tail_ || from >= head_ || at <= from) {  // an old note
    if (head_ - tail_ > size_) damaged();
    return head_;
  }
  if (at > head_ || at - from > size_ || from - tail_ > size_ || head_ - at > size_ || from % kRingUnit != 0 ||
      at % kRingUnit != 0) {
    damaged();
  }
  if (tail_ != from) return from;
  tail_ = at;
  return head_;
}

void RingReader::consume(size_t num_bytes) {
  tail_ += num_bytes;
  control_->tail.store(tail_);
}

}  // namespace torchtp::shm
