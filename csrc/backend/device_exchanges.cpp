#include "backend/device_exchanges.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <cstdlib>

#include "backend/device_facts.h"
#include "backend/grouped_exchange.h"
#include "backend/host_arena.h"
#include "backend/recorded_exchange.h"
#include "backend/store_bootstrap.h"
#include "backend/symmetric_memory.h"
#include "core/format.h"
#include "exchange/arena_exchange.h"
#include "exchange/halo_device_cuda.h"
#include "exchange/null_exchange.h"
#include "exchange/shm_exchange.h"
#include "exchange/staged_exchange.h"

namespace torchtp::backend {

using exchange::ArenaExchange;
using exchange::HaloDevice;
using exchange::StagedExchange;

namespace {

constexpr size_t kDeviceArenaBytes = size_t{64} << 20, kHostArenaBytes = size_t{2} << 20;

size_t arena_bytes(size_t otherwise) {
  const char* const text = std::getenv("TORCHTP_ARENA_BYTES");
  if (text == nullptr || *text == 0) return otherwise;
  char* end = nullptr;
  const unsigned long long bytes = std::strtoull(text, &end, 10);
  if (*end != 0 || bytes == 0) throw Error(cat("TORCHTP_ARENA_BYTES is a number of bytes, not ", text));
  return static_cast<size_t>(bytes);
}

// As long as any other call of the group may take.
std::chrono::milliseconds timeout_of(const c10::intrusive_ptr<c10d::ProcessGroup>& group, c10::DeviceType type) {
  const char* const text = std::getenv("TORCHTP_EXCHANGE_TIMEOUT");
  if (text != nullptr && *text != 0) {
    char* end = nullptr;
    const double seconds = std::strtod(text, &end);
    if (*end != 0 || !(seconds > 0 && seconds < 1e9)) {
      throw Error(cat("TORCHTP_EXCHANGE_TIMEOUT must be a positive number of seconds, not '", text, "'"));
    }
    return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1e3));
  }
  try {
    return group->getBackend(type)->getBackendOptions()->timeout;
  } catch (const std::exception&) {  // of a backend without options
    return std::chrono::minutes(30);
  }
}

StoreBootstrap bootstrap_of(const c10::intrusive_ptr<c10d::ProcessGroup>& group, const std::string& group_name,
                            c10::Device device, std::chrono::milliseconds timeout) {
  const auto store = group->getStore();
  if (!store) throw Error("halos between devices: the process group has no store");
  const auto prefix = cat("torchtp_exchange/", group_name, "/", c10::DeviceTypeName(device.type(), true));
  return {c10::make_intrusive<c10d::PrefixStore>(prefix, store), group->getRank(), group->getSize(), timeout};
}

}  // namespace

DeviceExchanges::DeviceExchanges(const c10::intrusive_ptr<c10d::ProcessGroup>& group, std::string group_name,
                                 DeviceKind kind, std::weak_ptr<exchange::Exchange> host)
    : group_(group), group_name_(std::move(group_name)), kind_(kind), host_(std::move(host)) {}

std::shared_ptr<exchange::DeviceExchange> DeviceExchanges::get(c10::Device device) {
  const std::string name = device.str();
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const Made& made : made_) {
    if (made.device == name) return made.exchange;
  }
  made_.push_back(make(device));
  return made_.back().exchange;
}

std::vector<DeviceExchanges::Made> DeviceExchanges::made() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return made_;
}

std::shared_ptr<HaloDevice> DeviceExchanges::kernels(c10::Device device) {
#ifdef TORCHTP_CUDA
  if (device.is_cuda()) {
    const auto allocate = [device](size_t num_bytes) -> std::shared_ptr<std::byte> {
      const auto memory = std::make_shared<at::Tensor>(
          at::empty({static_cast<int64_t>(num_bytes)}, at::TensorOptions().dtype(at::kByte).device(device)));
      return {memory, static_cast<std::byte*>(memory->data_ptr())};
    };
    return std::make_shared<exchange::CudaHaloDevice>(device.index(), allocate);
  }
#endif
  if (device.is_cpu()) return std::make_shared<exchange::HostHaloDevice>();
  throw Error(cat("halos of ", device.str(), " tensors have no transport in this build; move the model to the CPU"));
}

DeviceExchanges::Made DeviceExchanges::make(c10::Device device) {
  const auto group = group_.lock();
  if (!group) throw Error("exchange: the process group has been destroyed");
  if (kind_ == DeviceKind::kNone) {
    return {device.str(), "", std::make_shared<exchange::NullDeviceExchange>(group->getRank(), group->getSize())};
  }
  if (device.is_cpu()) return make_on_host(group);
#ifdef TORCHTP_CUDA
  if (device.is_cuda()) return make_on_cuda(group, device);
#endif
  kernels(device);  // says that there are none
  return {};
}

DeviceExchanges::Made DeviceExchanges::make_on_host(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  const int rank = group->getRank(), size = group->getSize();
  const c10::Device device(c10::kCPU);
  const auto halo_kernels = kernels(device);
  if (kind_ == DeviceKind::kStaged) {
    return {"cpu", "", std::make_shared<StagedExchange>(halo_kernels, host_, rank, size)};
  }
  if (kind_ == DeviceKind::kGrouped) {
    return {"cpu", "", std::make_shared<GroupedExchange>(group, device, halo_kernels)};
  }
  const auto host = std::dynamic_pointer_cast<RecordedExchange>(host_.lock());
  const auto shared = std::dynamic_pointer_cast<exchange::ShmExchange>(host ? host->inner() : nullptr);
  if (!shared) {
    throw Error("halos cannot travel by peer_memory: the ranks share no memory; use the torchtp backend on one host");
  }
  const auto timeout = timeout_of(group, c10::kCPU);
  StoreBootstrap bootstrap = bootstrap_of(group, group_name_, device, timeout);
  auto memory = make_host_arena(shared->group(), bootstrap, [] { return arena_bytes(kHostArenaBytes); });
  return {"cpu", "",
          std::make_shared<ArenaExchange>(halo_kernels, std::move(memory), bootstrap, timeout, "peer_memory")};
}

#ifdef TORCHTP_CUDA
DeviceExchanges::Made DeviceExchanges::make_on_cuda(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                                    c10::Device device) {
  const int rank = group->getRank(), size = group->getSize();
  const auto halo_kernels = kernels(device);
  if (is_capturing(device)) {
    throw Error(
        "the first exchange of a process group sets up memory with the other ranks, which a graph cannot capture: run "
        "the model once before capturing it");
  }
  const auto timeout = timeout_of(group, c10::kCUDA);
  StoreBootstrap bootstrap = bootstrap_of(group, group_name_, device, timeout);
  std::vector<exchange::DeviceFacts> facts;
  for (const std::string& text : bootstrap.all_gather(facts_of(group, device, kind_).packed())) {
    facts.push_back(exchange::DeviceFacts::unpacked(text));
  }
  exchange::DeviceChoice choice = choose(facts);
  if (choice.kind == DeviceKind::kPeerMemory) {
    exchange::ArenaMemory memory;
    std::string trouble;
    try {
      memory = make_symmetric_arena(group_name_, device.index(), arena_bytes(kDeviceArenaBytes));
    } catch (const std::exception& error) {
      trouble = error.what();
    }
    for (const std::string& text : bootstrap.all_gather(trouble)) {
      if (trouble.empty()) trouble = text;
    }
    if (trouble.empty()) {
      return {device.str(), choice.why,
              std::make_shared<ArenaExchange>(halo_kernels, std::move(memory), bootstrap, timeout, "peer_memory")};
    }
    choice = choose(facts, true);
    choice.why += cat(" (", trouble, ")");
  }
  if (choice.kind == DeviceKind::kGrouped) {
    return {device.str(), choice.why, std::make_shared<GroupedExchange>(group, device, halo_kernels)};
  }
  return {device.str(), choice.why, std::make_shared<StagedExchange>(halo_kernels, host_, rank, size)};
}
#endif

}  // namespace torchtp::backend
