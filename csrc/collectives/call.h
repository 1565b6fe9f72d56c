#pragma once

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "collectives/reduce_op.h"
#include "core/stream_copy.h"
#include "shm/group.h"

namespace torchtp::collectives {

enum class Kind : uint8_t {
  kRefused,  // this rank found a mistake in its own arguments and joins only so that the others do not wait
  kAllreduce,
  kBroadcast,
  kAllgather,
  kReduceScatter,
  kReduce,
  kGather,
  kScatter,
  kAlltoall,
  kBarrier,
};

const char* name_of(Kind kind);

// One collective call on one rank: the group and the call's number in the group's order, the same on all ranks.
struct Call {
  shm::Group& group;
  uint64_t sequence;

  shm::Fingerprint fingerprint(Kind kind, int64_t count, c10::ScalarType dtype, int root = -1) const;
  shm::Fingerprint fingerprint(Kind kind, int64_t count, c10::ScalarType dtype, ReduceOp op, int root = -1) const;
};

// "allreduce(SUM, Float, 12 elements)": how a mismatch shows what a rank called.
std::string describe(const shm::Fingerprint& fingerprint);

// Below this a message is staged at once and every rank does all the work: one round.
constexpr size_t kSmallBytes = 32 * 1024;

constexpr size_t kAlignment = 64;

inline size_t align_down(size_t num_bytes) { return num_bytes / kAlignment * kAlignment; }

// Whether every rank announced a heap offset in the last round.
bool all_in_heap(const shm::Group& group);

inline void copy_bytes(std::byte* out, const std::byte* in, size_t num_bytes) {
  if (num_bytes != 0 && out != in) std::memcpy(out, in, num_bytes);
}

// The same into memory that another rank reads next.
inline void stage_bytes(std::byte* out, const std::byte* in, size_t num_bytes) {
  if (num_bytes != 0) stream_copy(out, in, num_bytes);
}

// Calls body(offset, size) for the pieces of [0, num_bytes), at least once, so that an empty message is a round too.
template <typename Body>
void for_each_chunk(size_t num_bytes, size_t chunk_bytes, const Body& body) {
  size_t offset = 0;
  do {
    body(offset, std::min(chunk_bytes, num_bytes - offset));
    offset += chunk_bytes;
  } while (offset < num_bytes);
}

}  // namespace torchtp::collectives
