// Memory that a process group gives out: its collectives need not copy it.
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include "backend/torchtp_backend.h"
#include "backend/work.h"
#include "core/error.h"
#include "core/memory_left.h"

namespace torchtp::backend {

at::Tensor TorchtpBackend::allocateTensor(long size, at::TensorOptions options) {
  const at::ScalarType dtype = c10::typeMetaToScalarType(options.dtype());
  TORCH_CHECK_VALUE(size >= 0, "allocate_tensor: the number of elements cannot be negative, and is ", size);
  TORCH_CHECK_VALUE(!c10::isQIntType(dtype), "allocate_tensor gives plain memory, and a tensor of dtype ", dtype,
                    " needs a quantizer; take its integers (uint8, int8, int32)");
  TORCH_CHECK_VALUE(options.device().is_cpu() || options.device().is_cuda(),
                    "allocate_tensor gives memory of the CPU or of a CUDA device, not on ", options.device());
  const size_t num_bytes = size * options.dtype().itemsize();
  if (!options.device().is_cpu()) {
    // An inner backend may have to connect all ranks to register memory: only when all have used it already.
    const auto inner = device_->takes(options.device()) ? device_->made() : nullptr;
    const bool registers = inner && is_announced() && inner->supportsTensorAlloc(options.device().index());
    return registers ? inner->allocateTensor(size, options) : at::empty({size}, options);
  }
  if (num_bytes == 0) return at::empty({size}, options);
  try {
    std::byte* memory = engine_->host()->allocate(num_bytes);
    return at::from_blob(
        memory, {size}, [group = engine_->host()](void* pointer) { group->free(static_cast<std::byte*>(pointer)); },
        options);
  } catch (const OutOfMemory&) {  // ordinary memory would be a promise that nobody can keep
    std::rethrow_exception(as_dist_error(std::current_exception()));
  } catch (const Error& error) {
    TORCH_WARN_ONCE("torchtp gives ordinary memory instead of shared memory, which costs a copy in collectives: ",
                    error.what());
    return at::empty({size}, options);
  }
}

std::shared_ptr<c10::Allocator> TorchtpBackend::getMemAllocator() { return device_->get()->getMemAllocator(); }

}  // namespace torchtp::backend
