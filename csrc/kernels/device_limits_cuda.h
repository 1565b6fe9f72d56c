#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>

#include "kernels/block_program.h"

namespace torchtp::kernels {

// What a plan may have a block ask for on a device; 0 if it does not say.
inline size_t most_shared_bytes(int device) {
  int bytes = 0;
  if (cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) != cudaSuccess) return 0;
  return std::min(kMostSharedBytes, static_cast<size_t>(std::max(0, bytes - kStaticSharedBytes)));
}

// On the current one.
inline size_t most_shared_bytes() {
  int device = 0;
  return cudaGetDevice(&device) == cudaSuccess ? most_shared_bytes(device) : 0;
}

// Of the current one; 1 if it does not say.
inline int multiprocessors() {
  int device = 0, count = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 1;
  return cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) == cudaSuccess ? count : 1;
}

}  // namespace torchtp::kernels
