#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "shm/segment.h"

namespace torchtp::shm {

constexpr size_t kRingUnit = 64;  // everything in a ring begins at a multiple of this

// A byte ring from one rank to another, without locks: one writer, one reader. Positions are 64-bit counts of bytes,
// the place in the ring is position % size.
//
// NOTE [restart] Always walking through the whole ring would touch memory that no cache holds and no page backs yet. So
// a message that finds the ring empty, and itself some KB from its beginning, starts over at the first byte: the writer
// notes "whoever stands at restart_from goes on at restart_at" and then publishes its head as ever. The reader looks at
// the note when it finds news after having stood at the end; the writer changes the note only while the reader stands
// at the end, so the two never meet.
class RingWriter {
 public:
  RingWriter(std::shared_ptr<Segment> segment, Channel channel, int from, int to);

  void begin_message();  // what follows may start over at the first byte
  // Where to write next. On return num_bytes says how much: at most what was asked, up to the end of the ring or the
  // oldest unread byte, in whole units; zero when full.
  std::byte* room(size_t& num_bytes);
  // Makes the first num_bytes of room() readable. Sequentially consistent, so that Group::notify may follow.
  void publish(size_t num_bytes);

 private:
  void reserve(size_t end);

  std::shared_ptr<Segment> segment_;
  RingControl* control_;
  std::byte* data_;
  size_t size_;
  uint64_t head_;
  uint64_t tail_;  // the last one seen
  size_t reserved_ = 0;
};

class RingReader {
 public:
  RingReader(std::shared_ptr<Segment> segment, Channel channel, int from, int to);

  // What can be read without crossing the end of the ring, in whole units; zero when nothing has come.
  const std::byte* news(size_t& num_bytes);
  void consume(size_t num_bytes);

 private:
  std::shared_ptr<Segment> segment_;
  RingControl* control_;
  const std::byte* data_;
  size_t size_;
  uint64_t head_;  // the last one seen
  uint64_t tail_;
};

}  // namespace torchtp::shm
