#pragma once

#include "collectives/call.h"

namespace torchtp::collectives {

constexpr int kEveryRank = -1;

// What allreduce and reduce share: `data` of all ranks reduced in rank order, in place on `root` (or on every rank).
// Up to kSmallBytes: staged, one round, who wants the result reduces everything.
// All buffers in heaps, and more than 8 KB: rank r reduces the r-th share of all of them where they lie and writes it
// where it is wanted. Otherwise: chunks go through the slots, where rank r does the same with its share of each.
void reduce_rounds(const Call& call, const shm::Fingerprint& print, std::byte* data, int64_t count,
                   c10::ScalarType dtype, ReduceOp op, int root);

}  // namespace torchtp::collectives
