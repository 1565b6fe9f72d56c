#include "exchange/halo_device_cuda.h"

#ifdef TORCHTP_CUDA
#include "kernels/halo_exchange_cuda.h"

namespace torchtp::exchange {

void CudaHaloDevice::pack(const kernels::HaloPack& pack, Stream stream) { kernels::launch_halo_pack(pack, stream); }

void CudaHaloDevice::push(const kernels::HaloPushParams& params, Stream stream) {
  kernels::launch_halo_push(params, stream);
}

void CudaHaloDevice::wait(const kernels::HaloWaitParams& params, Stream stream) {
  kernels::launch_halo_wait(params, stream);
}

void CudaHaloDevice::take(const kernels::HaloTakeParams& params, Stream stream) {
  kernels::launch_halo_take(params, stream);
}

void CudaHaloDevice::enter(Stream stream) {
  if (entered_ && stream != last_ && graph_of(stream) == graph_of(last_)) {
    // A graph is captured apart from what was enqueued before; who captures waits for the device first.
    require_cuda(cudaEventRecord(event_.get(), last_), "order of streams");
    require_cuda(cudaStreamWaitEvent(stream, event_.get(), 0), "order of streams");
  }
  last_ = stream;
  entered_ = true;
}

uint64_t CudaHaloDevice::graph_of(Stream stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long graph = 0;
  if (cudaStreamGetCaptureInfo(stream, &status, &graph) != cudaSuccess) cudaGetLastError();
  return status == cudaStreamCaptureStatusActive ? graph : 0;
}

void CudaHaloDevice::write(void* to, const void* from, size_t num_bytes, Stream stream) {
  const CurrentDevice current(device_);
  require_cuda(cudaMemcpyAsync(to, from, num_bytes, cudaMemcpyDefault, stream), "copy to the device");
  require_cuda(cudaStreamSynchronize(stream), "copy to the device");
}

void CudaHaloDevice::read(void* to, const void* from, size_t num_bytes, Stream stream) {
  const CurrentDevice current(device_);
  require_cuda(cudaMemcpyAsync(to, from, num_bytes, cudaMemcpyDefault, stream), "copy from the device");
  require_cuda(cudaStreamSynchronize(stream), "copy from the device");
}

void CudaHaloDevice::store(uint64_t* word, uint64_t value) {
  // May come while another thread captures a graph, and is no part of it.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  require_cuda(cudaThreadExchangeStreamCaptureMode(&mode), "store");
  try {
    const CurrentDevice current(device_);
    if (entered_ && graph_of(last_) == 0) require_cuda(cudaStreamSynchronize(last_), "store");
    require_cuda(cudaMemcpy(word, &value, sizeof(value), cudaMemcpyDefault), "store");
  } catch (...) {
    cudaThreadExchangeStreamCaptureMode(&mode);
    throw;
  }
  cudaThreadExchangeStreamCaptureMode(&mode);
}

}  // namespace torchtp::exchange
#endif
