// The library of this folder knows one rank only.
#include <c10/util/Exception.h>

#include "backend/device_exchange_of.h"
#include "backend/exchanges.h"
#include "backend/reduce.h"

namespace torchtp::backend {

SpatialGroup spatial_group(const std::string& group_name) {
  TORCH_CHECK(false, "the test device has no group ", group_name);
}

std::shared_ptr<exchange::DeviceExchange> device_exchange_of(const SpatialGroup&, const c10::Device&) {
  return nullptr;
}

at::Tensor all_gather(const at::Tensor& mine, const std::vector<std::string>& groups) {
  TORCH_CHECK(groups.empty(), "the test device has no groups");
  return mine.unsqueeze(0);
}

void all_reduce(const at::Tensor&, const std::vector<std::string>& groups) {
  TORCH_CHECK(groups.empty(), "the test device has no groups");
}

}  // namespace torchtp::backend
