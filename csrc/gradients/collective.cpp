#include "gradients/collective.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>

namespace torchtp::gradients {

Collective::Collective(const c10::intrusive_ptr<c10d::ProcessGroup>& group)
    : group_(group), rank_(group->getRank()), size_(group->getSize()) {}

c10::intrusive_ptr<c10d::ProcessGroup> Collective::group() const {
  auto group = group_.lock();
  TORCH_CHECK(group, "gradients: the process group has been destroyed; make a new reducer with a living group");
  return group;
}

at::Tensor Collective::allocate(int64_t num_elements, const at::TensorOptions& options) const {
  if (num_elements > 0) {
    const at::Device device = options.device();
    const auto backend = group()->getBackend(device.type());
    if (backend->supportsTensorAlloc(device.index())) return backend->allocateTensor(num_elements, options).zero_();
  }
  return at::zeros({num_elements}, options);
}

bool Collective::divides_beforehand(const at::Device& device) const {
  const std::string name = group()->getBackend(device.type())->getBackendName();
  return name != "torchtp" && name != "nccl";
}

c10::intrusive_ptr<c10d::Work> Collective::start(const at::Tensor& buffer, const c10d::ReduceOp& op) const {
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  options.asyncOp = true;
  std::vector<at::Tensor> buffers{buffer};
  return group()->allreduce(buffers, options);
}

c10::intrusive_ptr<c10d::Work> Collective::start_sum(const at::Tensor& buffer) const {
  return start(buffer, c10d::ReduceOp::SUM);
}

c10::intrusive_ptr<c10d::Work> Collective::start_mean(const at::Tensor& buffer) const {
  if (!divides_beforehand(buffer.device())) return start(buffer, c10d::ReduceOp::AVG);
  buffer.mul_(1.0 / size_);
  return start_sum(buffer);
}

void Collective::broadcast(const at::Tensor& buffer, int root) const {
  c10d::BroadcastOptions options;
  options.rootRank = root;
  std::vector<at::Tensor> buffers{buffer};
  group()->broadcast(buffers, options)->wait();
}

std::vector<std::string> Collective::all_gather(const std::string& mine, const at::Device& device) const {
  const auto gather = [&](const at::Tensor& own) {
    std::vector<at::Tensor> inputs{own.to(device)};
    std::vector<std::vector<at::Tensor>> outputs(1);
    for (int rank = 0; rank < size_; ++rank) outputs[0].push_back(at::zeros(own.sizes(), inputs[0].options()));
    group()->allgather(outputs, inputs)->wait();
    for (at::Tensor& output : outputs[0]) output = output.to(at::kCPU);
    return std::move(outputs[0]);
  };
  at::Tensor length = at::empty({1}, at::kLong);
  *length.data_ptr<int64_t>() = static_cast<int64_t>(mine.size());
  const std::vector<at::Tensor> lengths = gather(length);
  int64_t longest = 1;
  for (const at::Tensor& each : lengths) longest = std::max(longest, *each.data_ptr<int64_t>());
  at::Tensor text = at::zeros({longest}, at::kByte);
  std::memcpy(text.data_ptr<uint8_t>(), mine.data(), mine.size());
  const std::vector<at::Tensor> texts = gather(text);
  std::vector<std::string> all;
  for (int rank = 0; rank < size_; ++rank) {
    const auto* begin = reinterpret_cast<const char*>(texts[rank].data_ptr<uint8_t>());
    all.emplace_back(begin, *lengths[rank].data_ptr<int64_t>());
  }
  return all;
}

}  // namespace torchtp::gradients
