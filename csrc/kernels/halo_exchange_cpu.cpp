#include "kernels/halo_exchange.h"

namespace torchtp::kernels {

void halo_pack_cpu(const HaloPack& pack) { run_on_host(pack); }
void halo_push_cpu(const HaloPushParams& params) { run_on_host(HaloPush<HostAtomics>(params)); }
void halo_wait_cpu(const HaloWaitParams& params) { run_on_host(HaloWait<HostAtomics>(params)); }
void halo_take_cpu(const HaloTakeParams& params) { run_on_host(HaloTake<HostAtomics>(params)); }

}  // namespace torchtp::kernels
