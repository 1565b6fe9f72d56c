#pragma once

#include <ATen/core/Tensor.h>

#include "exchange/device_exchange.h"

// In place of csrc/spatial/stream.h: what is enqueued has happened at once.
namespace torchtp::spatial {

class OnStream {
 public:
  explicit OnStream(const at::Tensor&) {}
  exchange::Stream stream() const { return nullptr; }
};

inline void used_here(const at::Tensor&) {}

}  // namespace torchtp::spatial
