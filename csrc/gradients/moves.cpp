#include "gradients/moves.h"

#include <ATen/Dispatch_v2.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include "kernels/bucket_pack.h"
#ifdef TORCHTP_CUDA
#include <c10/cuda/CUDAStream.h>

#include "kernels/bucket_pack_cuda.h"
#endif

#define TORCHTP_BUCKET_TYPES at::kFloat, at::kHalf, at::kBFloat16

namespace torchtp::gradients {
namespace {

using kernels::BucketTensor;

enum class Direction { kPack, kUnpack };

bool has_kernels(at::ScalarType type) { return type == at::kFloat || type == at::kHalf || type == at::kBFloat16; }

template <typename T, typename F>
void run(Direction direction, const std::vector<BucketTensor>& tensors, const at::Tensor& buffer, float scale) {
  F* const flat = buffer.mutable_data_ptr<F>();
#ifdef TORCHTP_CUDA
  if (buffer.is_cuda()) {
    const auto stream = c10::cuda::getCurrentCUDAStream(buffer.device().index());
    const auto launch =
        direction == Direction::kPack ? kernels::launch_bucket_pack<T, F> : kernels::launch_bucket_unpack<T, F>;
    return launch(tensors, flat, scale, nullptr, stream);
  }
#endif
  const auto move = direction == Direction::kPack ? kernels::bucket_pack_cpu<T, F> : kernels::bucket_unpack_cpu<T, F>;
  move(tensors, flat, scale);
}

void move(Direction direction, const std::vector<Move>& moves, const at::Tensor& buffer, double scale) {
  if (moves.empty()) return;
  const at::ScalarType from = c10::toRealValueType(moves.front().tensor.scalar_type());
  const at::ScalarType to = buffer.scalar_type();
  TORCH_INTERNAL_ASSERT(moves_together(buffer.device(), from, to));
  const c10::DeviceGuard guard(buffer.device());
  std::vector<BucketTensor> tensors;
  for (const Move& each : moves) {
    const int64_t count = each.tensor.numel() * (each.tensor.is_complex() ? 2 : 1);
    tensors.push_back({each.tensor.data_ptr(), each.begin, count});
  }
  const auto factor = static_cast<float>(scale);
  if (from == to) {
    AT_DISPATCH_V2(to, "move", AT_WRAP([&] { run<scalar_t, scalar_t>(direction, tensors, buffer, factor); }),
                   TORCHTP_BUCKET_TYPES);
  } else if (to == at::kFloat) {
    AT_DISPATCH_V2(from, "move", AT_WRAP([&] { run<scalar_t, float>(direction, tensors, buffer, factor); }),
                   TORCHTP_BUCKET_TYPES);
  } else {
    AT_DISPATCH_V2(to, "move", AT_WRAP([&] { run<float, scalar_t>(direction, tensors, buffer, factor); }),
                   TORCHTP_BUCKET_TYPES);
  }
}

template <typename F>
void run_norm(const at::Tensor& buffer, kernels::NormPart* parts) {
  const F* const flat = buffer.const_data_ptr<F>();
#ifdef TORCHTP_CUDA
  if (buffer.is_cuda()) {
    const auto stream = c10::cuda::getCurrentCUDAStream(buffer.device().index());
    return kernels::launch_bucket_norm(flat, buffer.numel(), parts, stream);
  }
#endif
  kernels::bucket_norm_cpu(flat, buffer.numel(), parts);
}

void run_factor(const kernels::NormPart* parts, int64_t num_parts, float most, const at::Tensor& result) {
  auto* const out = reinterpret_cast<kernels::ClipResult*>(result.mutable_data_ptr<float>());
#ifdef TORCHTP_CUDA
  if (result.is_cuda()) {
    const auto stream = c10::cuda::getCurrentCUDAStream(result.device().index());
    return kernels::launch_clip_factor(parts, num_parts, most, out, stream);
  }
#endif
  kernels::clip_factor_cpu(parts, num_parts, most, out);
}

}  // namespace

bool moves_together(const at::Device& device, at::ScalarType tensors, at::ScalarType buffer) {
  tensors = c10::toRealValueType(tensors);
  if (!has_kernels(tensors) || !has_kernels(buffer)) return false;
  if (tensors != buffer && tensors != at::kFloat && buffer != at::kFloat) return false;
#ifdef TORCHTP_CUDA
  return device.is_cpu() || device.is_cuda();
#else
  return device.is_cpu();
#endif
}

void pack(const std::vector<Move>& moves, const at::Tensor& buffer, double scale) {
  move(Direction::kPack, moves, buffer, scale);
}

void unpack(const std::vector<Move>& moves, const at::Tensor& buffer, double scale) {
  move(Direction::kUnpack, moves, buffer, scale);
}

at::Tensor norm_and_factor(const std::vector<at::Tensor>& buffers, double most) {
  const at::TensorOptions options = buffers.front().options();
  const c10::DeviceGuard guard(options.device());
  int64_t num_parts = 0;
  for (const at::Tensor& buffer : buffers) num_parts += kernels::bucket_norm_parts(buffer.numel());
  static_assert(sizeof(kernels::NormPart) == 2 * sizeof(double) && sizeof(kernels::ClipResult) == 3 * sizeof(float));
  const at::Tensor memory = at::empty({num_parts, 2}, options.dtype(at::kDouble));
  const at::Tensor result = at::empty({3}, options.dtype(at::kFloat));
  auto* const parts = reinterpret_cast<kernels::NormPart*>(memory.mutable_data_ptr<double>());
  int64_t next = 0;
  for (const at::Tensor& buffer : buffers) {
    AT_DISPATCH_V2(buffer.scalar_type(), "norm", AT_WRAP([&] { run_norm<scalar_t>(buffer, parts + next); }),
                   TORCHTP_BUCKET_TYPES);
    next += kernels::bucket_norm_parts(buffer.numel());
  }
  run_factor(parts, num_parts, static_cast<float>(most), result);
  return result;
}

}  // namespace torchtp::gradients
