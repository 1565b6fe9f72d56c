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
// a message that begins some KB from the beginning of the ring starts over at the first byte, if the reader has left
// room for all of it there: the writer notes "who comes to restart_from goes on at restart_at" and then publishes its
// head as ever. A reader whose head lies beyond restart_from sees the note; the writer changes it only when the reader
// has gone past restart_at, so the two never meet.
class RingWriter {
 public:
  RingWriter(std::shared_ptr<Segment> segment, Channel channel, int from, int to);

  void begin_message(size_t num_bytes);  // what follows, so many bytes, may start over at the first byte
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
  uint64_t restarted_at_;
  size_t reserved_ = 0;
};

class RingReader {
 public:
  RingReader(std::shared_ptr<Segment> segment, Channel channel, int from, int to);

  // What can be read without crossing the end of the ring, in whole units; zero when nothing has come. Until it is
  // consumed nobody else reads or writes it.
  std::byte* news(size_t& num_bytes);
  void consume(size_t num_bytes);

 private:
  uint64_t end_of_lap();

  std::shared_ptr<Segment> segment_;
  RingControl* control_;
  std::byte* data_;
  size_t size_;
  uint64_t head_;  // the last one seen
  uint64_t tail_;
};

}  // namespace torchtp::shm
