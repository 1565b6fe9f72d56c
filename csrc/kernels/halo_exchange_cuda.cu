#include "kernels/halo_exchange_cuda.h"

#include "kernels/block_program_cuda.h"

namespace torchtp::kernels {

void launch_halo_pack(const HaloPack& pack, cudaStream_t stream) { launch_program("halo_pack", pack, stream); }

void launch_halo_push(const HaloPushParams& params, cudaStream_t stream) {
  launch_program("halo_push", HaloPush<DeviceAtomics>(params), stream);
}

void launch_halo_wait(const HaloWaitParams& params, cudaStream_t stream) {
  launch_program("halo_wait", HaloWait<DeviceAtomics>(params), stream);
}

void launch_halo_take(const HaloTakeParams& params, cudaStream_t stream) {
  launch_program("halo_take", HaloTake<DeviceAtomics>(params), stream);
}

}  // namespace torchtp::kernels
