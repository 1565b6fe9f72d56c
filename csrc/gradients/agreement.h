#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "gradients/collective.h"
#include "gradients/options.h"

namespace torchtp::gradients {

// Collective. Throws the same error on every rank unless all have the same parameters (names, shapes, dtypes, kind of
// device, strides) in the same order and the same options.
void check_agreement(const Collective& collective, const std::vector<at::Tensor>& parameters,
                     const std::vector<std::string>& names, const Options& options);

// Collective: rank 0's `order`, of as many numbers on every rank.
std::vector<int64_t> take_order(const Collective& collective, const std::vector<int64_t>& order,
                                const at::Device& device);

}  // namespace torchtp::gradients
