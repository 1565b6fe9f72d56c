// The collectives of HostsEngine: inside the host over shared memory, between hosts every rank with its counterparts.
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "backend/dense.h"
#include "backend/hosts_engine.h"
#include "collectives/allreduce.h"
#include "collectives/alltoall.h"
#include "collectives/broadcast.h"
#include "collectives/gather.h"
#include "collectives/scatter.h"
#include "core/format.h"
#include "core/interval.h"

namespace torchtp::backend {
namespace {

using collectives::fingerprint;
using collectives::Kind;
using collectives::partial_dtype;
using collectives::partial_op;
using collectives::Piece;

at::Tensor view(std::byte* data, int64_t count, at::ScalarType dtype) {
  return at::from_blob(data, {count}, at::TensorOptions().dtype(dtype));
}

at::Tensor view(const std::byte* data, int64_t count, at::ScalarType dtype) {
  return view(const_cast<std::byte*>(data), count, dtype);
}

constexpr size_t kSlack = 64;  // of each Scratch::take()

// Memory for what arrives from other hosts.
class Scratch {
 public:
  explicit Scratch(size_t num_bytes)
      : memory_(at::empty({static_cast<int64_t>(num_bytes)}, at::TensorOptions().dtype(at::kByte))) {}

  std::byte* take(size_t num_bytes) {
    std::byte* const place = bytes_of(memory_) + used_;
    used_ += (num_bytes + kSlack - 1) / kSlack * kSlack;
    return place;
  }

 private:
  at::Tensor memory_;
  size_t used_ = 0;
};

}  // namespace

HostsEngine::Range HostsEngine::part_of(int64_t count, int num_parts, int index) {
  const int64_t line = 64;  // elements: parts begin where vectors do
  const int64_t most = ceil_div(ceil_div(count, num_parts), line) * line;
  const int64_t begin = std::min(index * most, count);
  return {begin, std::min(begin + most, count)};
}

std::vector<Piece> HostsEngine::cut(std::byte* data, int64_t count, at::ScalarType dtype) const {
  std::vector<Piece> pieces;
  for (int i = 0; i < num_pieces(); ++i) {
    const Range part = part_of(count, num_pieces(), i);
    std::byte* const place = data + part.begin * c10::elementSize(dtype);
    pieces.push_back({place, place, part.count(), local_carrier(i)});
  }
  return pieces;
}

std::byte* HostsEngine::bounce_buffer(size_t num_bytes) {
  if (bounce_ == nullptr) {
    try {
      bounce_ = HeapBuffer(host_->allocate(num_bytes), [host = host_](std::byte* memory) { host->free(memory); });
    } catch (const Error&) {
      return nullptr;  // no room: the slots do it, in more rounds
    }
  }
  return bounce_.get();
}

void HostsEngine::allreduce(uint64_t sequence, std::byte* data, int64_t count, at::ScalarType dtype, ReduceOp op) {
  guarded([&] { reduce_all(fingerprint(sequence, Kind::kAllreduce, count, dtype, op), data, count, dtype, op); });
}

// As allreduce, of a copy: a rank that is not the root keeps what it has.
void HostsEngine::reduce(uint64_t sequence, std::byte* data, int64_t count, at::ScalarType dtype, ReduceOp op,
                         int root) {
  guarded([&] {
    const at::Tensor copy = view(data, count, dtype).clone();
    reduce_all(fingerprint(sequence, Kind::kReduce, count, dtype, op, root), bytes_of(copy), count, dtype, op);
    if (rank_ == root) view(data, count, dtype).copy_(copy);
  });
}

void HostsEngine::reduce_all(const shm::Fingerprint& print, std::byte* data, int64_t count, at::ScalarType dtype,
                             ReduceOp op) {
  const at::ScalarType wide = partial_dtype(dtype, op);
  if (wide != dtype) {
    const at::Tensor sum = view(data, count, dtype).to(wide);
    reduce_all(print, bytes_of(sum), count, wide, op);
    view(data, count, dtype).copy_(sum);
  } else if (count * c10::elementSize(dtype) <= most_inline()) {
    reduce_small(print, data, count, dtype, op);
  } else {
    reduce_in_blocks(print, data, count, dtype, op);
  }
}

void HostsEngine::reduce_small(const shm::Fingerprint& print, std::byte* data, int64_t count, at::ScalarType dtype,
                               ReduceOp op) {
  collectives::allreduce(call(print), data, count, dtype, partial_op(op));
  const auto partial = meet(print, data, count * c10::elementSize(dtype));
  if (here_.index == 0) {
    Inputs inputs;
    for (const auto& of_host : partial) inputs.push_back(of_host.data());
    collectives::reduce_inputs(data, inputs, count, dtype, op, size_);
  }
  collectives::broadcast(call(print), data, count, dtype, 0);
}

void HostsEngine::reduce_scatter(uint64_t sequence, const Inputs& inputs, std::byte* output, int64_t count,
                                 at::ScalarType dtype, ReduceOp op) {
  guarded([&] {
    const shm::Fingerprint print = fingerprint(sequence, Kind::kReduceScatter, count, dtype, op);
    settle(print);
    const at::ScalarType wide = partial_dtype(dtype, op);
    if (wide == dtype) return reduce_scatter_now(print, inputs, output, count, dtype, op);
    std::vector<at::Tensor> widened;
    Inputs places;
    for (const std::byte* input : inputs) {
      widened.push_back(view(input, count, dtype).to(wide));
      places.push_back(bytes_of(widened.back()));
    }
    const at::Tensor sum = at::empty({count}, at::TensorOptions().dtype(wide));
    reduce_scatter_now(print, places, bytes_of(sum), count, wide, op);
    view(output, count, dtype).copy_(sum);
  });
}

// Inside each host the carrier of a rank's piece reduces it; the rank itself adds up what the hosts send.
void HostsEngine::reduce_scatter_now(const shm::Fingerprint& print, const Inputs& inputs, std::byte* output,
                                     int64_t count, at::ScalarType dtype, ReduceOp op) {
  const size_t num_bytes = count * c10::elementSize(dtype);
  Scratch scratch((num_bytes + kSlack) * (size_ + num_hosts()));
  std::vector<Piece> pieces;
  std::vector<Transfer> sends, receives;
  std::byte* own = nullptr;
  for (int r = 0; r < size_; ++r) {
    const int owner = is_here(r) ? places_[r].index : local_carrier(places_[r].index);
    std::byte* const place = owner == here_.index ? scratch.take(num_bytes) : nullptr;
    pieces.push_back({inputs[r], place, count, owner});
    if (r == rank_) own = place;
    if (owner == here_.index && !is_here(r)) sends.push_back({r, place, num_bytes});
  }
  collectives::reduce_pieces(call(print), print, pieces, dtype, partial_op(op));
  Inputs partial;
  for (int h = 0; h < num_hosts(); ++h) {
    if (h != here_.host) receives.push_back({carrier(h, here_.index), scratch.take(num_bytes), num_bytes});
    partial.push_back(h == here_.host ? own : receives.back().data);
  }
  finish(post(sends, receives), print);
  collectives::reduce_inputs(output, partial, count, dtype, op, size_);
}

void HostsEngine::broadcast(uint64_t sequence, std::byte* data, int64_t count, at::ScalarType dtype, int root) {
  guarded([&] {
    const shm::Fingerprint print = fingerprint(sequence, Kind::kBroadcast, count, dtype, root);
    const size_t num_bytes = count * c10::elementSize(dtype);
    const bool from_here = is_here(root);
    if (num_bytes <= most_inline()) {
      if (from_here) {
        collectives::broadcast(call(print), data, count, dtype, places_[root].index);
      } else {
        host_->round(print);
      }
      const auto all = meet(print, data, num_bytes);
      if (!from_here && here_.index == 0 && num_bytes > 0) {
        std::memcpy(data, all[places_[root].host].data(), num_bytes);
      }
      return collectives::broadcast(call(print), data, count, dtype, 0);
    }
    settle(print);
    if (from_here) collectives::broadcast(call(print), data, count, dtype, places_[root].index);
    const std::vector<Piece> pieces = cut(data, count, dtype);
    std::vector<Transfer> sends, receives;
    for (int i = 0; i < static_cast<int>(pieces.size()); ++i) {
      if (pieces[i].owner != here_.index) continue;
      const size_t piece_bytes = pieces[i].count * c10::elementSize(dtype);
      if (!from_here) receives.push_back({carrier(places_[root].host, i), pieces[i].output, piece_bytes});
      for (int h = 0; from_here && h < num_hosts(); ++h) {
        if (h != here_.host) sends.push_back({carrier(h, i), pieces[i].output, piece_bytes});
      }
    }
    finish(post(sends, receives), print);
    if (!from_here) collectives::spread_pieces(call(print), print, pieces, dtype);
  });
}

void HostsEngine::allgather(uint64_t sequence, const std::byte* input, const Outputs& outputs, int64_t count,
                            at::ScalarType dtype) {
  guarded([&] {
    const shm::Fingerprint print = fingerprint(sequence, Kind::kAllgather, count, dtype);
    settle(print);
    gather_all(print, input, outputs, count, dtype);
  });
}

void HostsEngine::gather_all(const shm::Fingerprint& print, const std::byte* input, const Outputs& outputs,
                             int64_t count, at::ScalarType dtype) {
  const size_t num_bytes = count * c10::elementSize(dtype);
  collectives::copy_bytes(outputs[rank_], input, num_bytes);
  std::vector<Transfer> sends, receives;
  std::vector<Piece> pieces;
  for (int r = 0; r < size_; ++r) {
    const int owner = is_here(r) ? places_[r].index : local_carrier(places_[r].index);
    pieces.push_back({outputs[r], outputs[r], count, owner});
    if (owner == here_.index && !is_here(r)) receives.push_back({r, outputs[r], num_bytes});
  }
  for (int h = 0; h < num_hosts(); ++h) {
    if (h != here_.host) sends.push_back({carrier(h, here_.index), outputs[rank_], num_bytes});
  }
  finish(post(sends, receives), print);
  collectives::spread_pieces(call(print), print, pieces, dtype);
}

void HostsEngine::gather(uint64_t sequence, const std::byte* input, const Outputs& outputs, int64_t count,
                         at::ScalarType dtype, int root) {
  guarded([&] {
    const shm::Fingerprint print = fingerprint(sequence, Kind::kGather, count, dtype, root);
    settle(print);
    const size_t num_bytes = count * c10::elementSize(dtype);
    if (!is_here(root)) return finish(post({{root, const_cast<std::byte*>(input), num_bytes}}, {}), print);
    std::vector<Transfer> receives;
    Outputs here;
    for (int r = 0; rank_ == root && r < size_; ++r) {
      if (is_here(r)) {
        here.push_back(outputs[r]);
      } else {
        receives.push_back({r, outputs[r], num_bytes});
      }
    }
    const auto messages = post({}, receives);
    collectives::gather(call(print), input, here, count, dtype, places_[root].index);
    finish(messages, print);
  });
}

void HostsEngine::scatter(uint64_t sequence, const Inputs& inputs, std::byte* output, int64_t count,
                          at::ScalarType dtype, int root) {
  guarded([&] {
    const shm::Fingerprint print = fingerprint(sequence, Kind::kScatter, count, dtype, root);
    settle(print);
    const size_t num_bytes = count * c10::elementSize(dtype);
    if (!is_here(root)) return finish(post({}, {{root, output, num_bytes}}), print);
    std::vector<Transfer> sends;
    Inputs here;
    for (int r = 0; rank_ == root && r < size_; ++r) {
      if (is_here(r)) {
        here.push_back(inputs[r]);
      } else {
        sends.push_back({r, const_cast<std::byte*>(inputs[r]), num_bytes});
      }
    }
    const auto messages = post(sends, {});
    collectives::scatter(call(print), here, output, count, dtype, places_[root].index);
    finish(messages, print);
  });
}

void HostsEngine::alltoall(uint64_t sequence, const Inputs& inputs, const std::vector<size_t>& send_bytes,
                           const Outputs& outputs, const std::vector<size_t>& receive_bytes, at::ScalarType dtype) {
  guarded([&] {
    const shm::Fingerprint print = fingerprint(sequence, Kind::kAlltoall, 0, dtype);
    settle(print);
    // Everybody learns all sizes, so that all throw where two do not agree.
    std::vector<int64_t> mine(send_bytes.begin(), send_bytes.end()), all(2 * size_ * size_);
    mine.insert(mine.end(), receive_bytes.begin(), receive_bytes.end());
    Outputs rows;
    for (int r = 0; r < size_; ++r) rows.push_back(reinterpret_cast<std::byte*>(&all[2 * size_ * r]));
    gather_all(print, reinterpret_cast<const std::byte*>(mine.data()), rows, 2 * size_, at::kLong);
    for (int s = 0; s < size_; ++s) {
      for (int d = 0; d < size_; ++d) {
        const int64_t sent = all[2 * size_ * s + d], expected = all[2 * size_ * d + size_ + s];
        if (sent != expected) {
          throw Error(cat("alltoall: rank ", s, " sends ", sent, " bytes to rank ", d, ", which expects ", expected,
                          "; the split sizes of both must agree"));
        }
      }
    }
    std::vector<Transfer> sends, receives;
    Inputs inputs_here;
    Outputs outputs_here;
    std::vector<size_t> send_bytes_here, receive_bytes_here;
    for (int r = 0; r < size_; ++r) {
      if (is_here(r)) {
        inputs_here.push_back(inputs[r]);
        outputs_here.push_back(outputs[r]);
        send_bytes_here.push_back(send_bytes[r]);
        receive_bytes_here.push_back(receive_bytes[r]);
      } else {
        sends.push_back({r, const_cast<std::byte*>(inputs[r]), send_bytes[r]});
        receives.push_back({r, outputs[r], receive_bytes[r]});
      }
    }
    const auto messages = post(sends, receives);
    collectives::alltoall(call(print), inputs_here, send_bytes_here, outputs_here, receive_bytes_here, dtype);
    finish(messages, print);
  });
}

}  // namespace torchtp::backend
