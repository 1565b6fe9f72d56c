#pragma once

#include <cuda_runtime_api.h>

#include "kernels/halo_pack.h"

namespace torchtp::kernels {

// Enqueued on `stream`: both pointers must stay valid until it has run. Throws torchtp::Error if the launch is refused.
void launch_halo_pack(const void* tensor, void* packed, const HaloSlabs& slabs, size_t element_bytes,
                      cudaStream_t stream);
void launch_halo_unpack(const void* packed, void* tensor, const HaloSlabs& slabs, size_t element_bytes,
                        cudaStream_t stream);

}  // namespace torchtp::kernels
