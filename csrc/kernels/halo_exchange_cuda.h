#pragma once

#include <cuda_runtime_api.h>

#include "kernels/halo_exchange.h"

namespace torchtp::kernels {

// Enqueued on `stream`; what the parameters point to must stay valid until it has run. Throw torchtp::Error if the
// launch is refused.
void launch_halo_pack(const HaloPack& pack, cudaStream_t stream);
void launch_halo_push(const HaloPushParams& params, cudaStream_t stream);
void launch_halo_wait(const HaloWaitParams& params, cudaStream_t stream);
void launch_halo_take(const HaloTakeParams& params, cudaStream_t stream);

}  // namespace torchtp::kernels
