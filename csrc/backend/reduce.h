#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace torchtp::backend {

// Small collectives of ops that need sums over ranks, over several groups (mesh axes) one after the other: together
// they are one over all their ranks. Collective; returns when the result may be used on the current stream.

// [number of ranks, *sizes of mine]: the same order on all ranks.
at::Tensor all_gather(const at::Tensor& mine, const std::vector<std::string>& groups);
// In place; contiguous.
void all_reduce(const at::Tensor& sum, const std::vector<std::string>& groups);

}  // namespace torchtp::backend
