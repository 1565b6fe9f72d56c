#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/interval.h"
#include "kernels/halo_move.h"

struct CUstream_st;

namespace torchtp::exchange {

// A CUDA stream, or null where kernels run on the CPU.
using Stream = CUstream_st*;

struct DeviceSend {
  int peer;
  uint32_t layout;  // arrives with the message
  int64_t num_bytes;
  std::vector<kernels::HaloSlab> slabs;  // that make the payload up
  std::shared_ptr<const void> memory;    // kept until the exchange is finished
};

struct DeviceReceive {
  int peer;
  int64_t num_bytes;
  kernels::HaloSlab slab;  // without data: the payload stays where it arrives
  kernels::HaloMerge merge = kernels::HaloMerge::kCopy;
  kernels::HaloLayout layout;  // that the receiver has in mind
  Interval rows;               // of the tensor it goes to: sums into rows of their own may run together
  std::shared_ptr<const void> memory;
  uint32_t* layout_out = nullptr;  // memory of the device; null, or where the sender's layout is written
};

// What exchange.h describes, between tensors of a device: everything is enqueued on a stream, nothing waits on the
// host. What an exchange sends is read by the work start() and finish() enqueue, what it receives is written by
// finish()'s. Calls on different streams are put in order. Thread-safe.
class DeviceExchange {
 public:
  virtual ~DeviceExchange() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Every rank makes the same sequence of calls, both sides of a message know its size.
  virtual uint64_t start(std::vector<DeviceSend> sends, std::vector<DeviceReceive> receives, Stream stream) = 0;

  // What is enqueued on the stream from here on finds every receive in its slab. Sums are made in ascending order of
  // peers. Returns, for each receive in the order given, where its payload lies if it stays where it arrived, else
  // null; when any does, release() must follow before the second next start().
  virtual std::vector<const std::byte*> finish(uint64_t ticket, Stream stream) = 0;
  // What is enqueued from here on no longer reads the payloads that stayed.
  virtual void release(uint64_t ticket, Stream stream) = 0;
  // Payloads up to this size can stay where they arrive.
  virtual int64_t largest_left() const = 0;

  // Throws what has gone wrong on any rank as far as this one knows by now (torchtp::Error); start() and finish() do
  // so too. After waiting for the stream it is sure to know what happened there.
  virtual void check() = 0;

  virtual std::string name() const = 0;
  virtual size_t memory_bytes() const = 0;  // that it keeps on the device
};

}  // namespace torchtp::exchange
