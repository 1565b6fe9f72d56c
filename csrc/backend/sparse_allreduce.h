#pragma once

#include <ATen/core/Tensor.h>

#include "backend/engine.h"

namespace torchtp::backend {

// Throws unless `tensor` is a sparse COO tensor and `op` is a sum.
void check_sparse(const at::Tensor& tensor, collectives::ReduceOp op);

// Replaces the sparse `tensor` by the sum over all ranks, coalesced: everybody gets all entries and adds them up, in
// the order of ranks.
void sparse_allreduce(const Call& call, const at::Tensor& tensor);

}  // namespace torchtp::backend
