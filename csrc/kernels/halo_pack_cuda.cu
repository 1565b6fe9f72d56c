#include <algorithm>
#include <string>

#include "core/error.h"
#include "kernels/halo_pack_cuda.h"

namespace torchtp::kernels {
namespace {

constexpr int64_t kThreads = 256;
constexpr int64_t kMaxBlocks = 4096;  // halos are small: enough to fill any device, the loop does the rest

template <typename Work>
__global__ void __launch_bounds__(kThreads) halo_copy_kernel(Work work, int64_t total) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < total; i += step) work(i);
}

template <typename Work>
void launch(const char* name, const Work& work, cudaStream_t stream) {
  const int64_t total = work.slabs.packed_elements();
  if (total == 0) return;  // a grid of zero blocks is a launch error
  const int64_t blocks = std::min((total + kThreads - 1) / kThreads, kMaxBlocks);
  halo_copy_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(work, total);
  const cudaError_t status = cudaGetLastError();
  if (status != cudaSuccess) throw Error(std::string(name) + ": launch refused: " + cudaGetErrorString(status));
}

void require_element_bytes(bool known, size_t element_bytes) {
  if (!known) throw Error("halo_pack: an element has 1, 2, 4, 8 or 16 bytes, not " + std::to_string(element_bytes));
}

}  // namespace

void launch_halo_pack(const void* tensor, void* packed, const HaloSlabs& slabs, size_t element_bytes,
                      cudaStream_t stream) {
  const bool known = dispatch_element_bytes(element_bytes, [&](auto element) {
    using T = decltype(element);
    launch("halo_pack", HaloPack<T>{static_cast<const T*>(tensor), static_cast<T*>(packed), slabs}, stream);
  });
  require_element_bytes(known, element_bytes);
}

void launch_halo_unpack(const void* packed, void* tensor, const HaloSlabs& slabs, size_t element_bytes,
                        cudaStream_t stream) {
  const bool known = dispatch_element_bytes(element_bytes, [&](auto element) {
    using T = decltype(element);
    launch("halo_unpack", HaloUnpack<T>{static_cast<const T*>(packed), static_cast<T*>(tensor), slabs}, stream);
  });
  require_element_bytes(known, element_bytes);
}

}  // namespace torchtp::kernels
