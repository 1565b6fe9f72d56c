#pragma once

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "collectives/reduce_op.h"
#include "core/claim_lines.h"
#include "core/contents.h"
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

// Flags of a fingerprint.
constexpr uint8_t kOnDevice = 1;  // an inner backend carries the call out, on a device's memory

// What ranks compare; `root` is -1 where there is none.
shm::Fingerprint fingerprint(uint64_t sequence, Kind kind, int64_t count, c10::ScalarType dtype, int root = -1);
shm::Fingerprint fingerprint(uint64_t sequence, Kind kind, int64_t count, c10::ScalarType dtype, ReduceOp op,
                             int root = -1);

// The name of the fingerprint's reduce op; empty where nothing is reduced.
const char* reduce_op_of(const shm::Fingerprint& fingerprint);

// One collective call on one rank: the group and the call's number in the group's order, the same on all ranks.
struct Call {
  shm::Group& group;
  uint64_t sequence;
  const shm::Fingerprint* whole = nullptr;  // of the call that this one is a part of: what ranks then compare

  template <typename... Arguments>
  shm::Fingerprint fingerprint(Kind kind, Arguments... arguments) const {
    return whole != nullptr ? *whole : collectives::fingerprint(sequence, kind, arguments...);
  }
};

// "allreduce #7 (SUM, fp32, 1,024 elements, label)": how messages show what a rank called.
std::string describe(const shm::Fingerprint& fingerprint, const std::string& label = "");

// "16 bytes of fp32", "5 bytes", of contents whose dtype is a c10::ScalarType.
std::string describe_contents(const Contents& contents);

// Below this a message is staged at once and every rank does all the work: one round.
constexpr size_t kSmallBytes = 32 * 1024;

constexpr size_t kAlignment = 64;

inline size_t align_down(size_t num_bytes) { return num_bytes / kAlignment * kAlignment; }

// Whether every rank announced a heap offset in the last round.
bool all_in_heap(const shm::Group& group);

inline void copy_bytes(std::byte* out, const std::byte* in, size_t num_bytes) {
  if (num_bytes != 0 && out != in) std::memcpy(out, in, num_bytes);
}

// The same into memory that another rank of the group reads next.
inline void stage_bytes(shm::Group& group, std::byte* out, const std::byte* in, size_t num_bytes) {
  group.staging().copy(out, in, num_bytes);
}

// A piece of a result of `total_bytes` out of a slot, where `sole` is whether no other rank reads it there.
inline void take_bytes(std::byte* out, std::byte* staged, size_t num_bytes, size_t total_bytes, bool sole) {
  if (sole) {
    claiming_copy(out, staged, num_bytes, total_bytes);
  } else {
    result_copy(out, staged, num_bytes, total_bytes);
  }
}

// After a look at this part of all other slots, which no other rank reads.
inline void claim_of_peers(shm::Group& group, size_t offset, size_t num_bytes) {
  for (int r = 0; r < group.size(); ++r) {
    if (r != group.rank()) claim_lines(group.peer_slot(r) + offset, num_bytes);
  }
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
