#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace torchtp::exchange {

// Where the bytes of a message come from. A transport may ask for the payload in pieces.
class Source {
 public:
  virtual ~Source() = default;
  // Packs bytes [offset, offset + num_bytes) of the payload into `out`.
  virtual void read(size_t offset, std::byte* out, size_t num_bytes) const = 0;
};

// Where the bytes of a message go: called in order of offset, in pieces cut at multiples of 64 bytes.
class Sink {
 public:
  virtual ~Sink() = default;
  // `layout` is what the sender said of its payload (see Send).
  virtual void write(uint32_t layout, size_t offset, const std::byte* in, size_t num_bytes) = 0;
};

struct Send {
  int peer;
  uint32_t layout;  // opaque to the transport; arrives with the message
  size_t num_bytes;
  std::shared_ptr<const Source> source;
};

struct Receive {
  int peer;
  size_t num_bytes;
  std::shared_ptr<Sink> sink;
};

// Of the receives of an exchange, the one whose sender began last.
struct LastSender {
  int peer = -1;         // -1: there is none, or it is not known
  int64_t began_ns = 0;  // core/clock.h; the sender's word
};

// Moves slabs between the ranks of one group. All ranks issue the same sequence of start() calls, both sides of a
// message know its size beforehand, and no message goes to oneself. Messages of zero bytes arrive too.
class Exchange {
 public:
  virtual ~Exchange() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Returns at once with a ticket. Packs as much as the transport has room for; the rest leaves during finish().
  // Several exchanges may be under way; they may be finished in any order.
  virtual uint64_t start(std::vector<Send> sends, std::vector<Receive> receives) = 0;

  // When it returns, every receive of the ticket is in its sink and every send has left its source. Sinks are written
  // in ascending order of peer, so that a sum has the same order on every run. Throws torchtp::Error, naming the peer,
  // on a size mismatch, abort, death of a peer or deadline.
  virtual void finish(uint64_t ticket) = 0;
  virtual LastSender finish_telling(uint64_t ticket) {
    finish(ticket);
    return {};
  }
};

}  // namespace torchtp::exchange
