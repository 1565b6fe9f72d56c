// What a group was made with, and groups that c10d makes like it: of some of its ranks, or of its ranks and others.
#include <algorithm>

#include "backend/torchtp_backend.h"

namespace torchtp::backend {

c10::intrusive_ptr<c10d::Backend::Options> TorchtpBackend::getBackendOptions() {
  std::lock_guard<std::mutex> lock(mutex_);
  return c10::make_intrusive<Options>(*options_);
}

void TorchtpBackend::setTimeout(std::chrono::milliseconds timeout) {
  TORCH_CHECK_VALUE(timeout.count() > 0, "set_timeout: the timeout of a process group must be positive, not ",
                    timeout.count(), " ms");
  {
    std::lock_guard<std::mutex> lock(mutex_);
    options_->timeout = timeout;
    engine_->set_timeout(timeout);
  }
  if (const auto inner = device_->made()) inner->setTimeout(timeout);
}

c10::intrusive_ptr<c10d::Backend> TorchtpBackend::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                        const std::vector<int>& ranks,
                                                        const c10::intrusive_ptr<c10d::Backend::Options>& options) {
  const auto mine = std::find(ranks.begin(), ranks.end(), getRank());
  if (mine == ranks.end()) return nullptr;
  const std::vector<uint64_t>& global = options_->global_ranks_in_group;
  std::vector<uint64_t> global_ranks;
  for (const int rank : ranks) global_ranks.push_back(global.empty() ? rank : global.at(rank));
  return make_group_(store, static_cast<int>(mine - ranks.begin()), static_cast<int>(ranks.size()), options->timeout,
                     options->group_name, global_ranks);
}

c10::intrusive_ptr<c10d::Backend> TorchtpBackend::merge(const c10::intrusive_ptr<c10d::Store>& store,
                                                        const c10::intrusive_ptr<c10d::Backend::Options>& options,
                                                        const int& rank, const int& size) {
  return make_group_(store, rank, size, options->timeout, options->group_name, {});
}

}  // namespace torchtp::backend
