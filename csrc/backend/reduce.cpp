#include "backend/reduce.h"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace torchtp::backend {
namespace {

// Nobody gets a work of NCCL's synchronous calls: what follows on the current stream comes behind them.
void wait_for_reduction(const c10::intrusive_ptr<c10d::Work>& work) {
  if (work) work->wait();
}

}  // namespace

at::Tensor all_gather(const at::Tensor& mine, const std::vector<std::string>& groups) {
  at::Tensor all = mine.contiguous().unsqueeze(0);
  for (const std::string& name : groups) {
    const auto group = c10d::resolve_process_group(name);
    const int64_t size = group->getSize(), each = all.size(0);
    if (size == 1) continue;
    std::vector<int64_t> sizes = all.sizes().vec();
    sizes[0] = size * each;
    at::Tensor next = at::empty(sizes, all.options());
    std::vector<std::vector<at::Tensor>> parts(1);
    for (int64_t rank = 0; rank < size; ++rank) parts[0].push_back(next.narrow(0, rank * each, each));
    std::vector<at::Tensor> inputs{all};
    c10d::AllgatherOptions options;
    options.asyncOp = false;  // torchtp then stays on this thread
    wait_for_reduction(group->allgather(parts, inputs, options));
    all = next;
  }
  return all;
}

void all_reduce(const at::Tensor& sum, const std::vector<std::string>& groups) {
  for (const std::string& name : groups) {
    const auto group = c10d::resolve_process_group(name);
    if (group->getSize() == 1) continue;
    std::vector<at::Tensor> tensors{sum};
    c10d::AllreduceOptions options;
    options.asyncOp = false;
    wait_for_reduction(group->allreduce(tensors, options));
  }
}

}  // namespace torchtp::backend
