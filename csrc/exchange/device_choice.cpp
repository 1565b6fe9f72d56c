#include "exchange/device_choice.h"

#include <algorithm>
#include <array>
#include <sstream>

#include "core/error.h"
#include "core/format.h"

namespace torchtp::exchange {
namespace {

constexpr std::array<std::pair<const char*, DeviceKind>, 5> kNames{{{"auto", DeviceKind::kAuto},
                                                                    {"peer_memory", DeviceKind::kPeerMemory},
                                                                    {"grouped", DeviceKind::kGrouped},
                                                                    {"staged", DeviceKind::kStaged},
                                                                    {"none", DeviceKind::kNone}}};

bool has(const std::vector<std::string>& list, const std::string& item) {
  return std::find(list.begin(), list.end(), item) != list.end();
}

// What keeps the ranks from using each other's memory; empty if nothing does.
std::string against_peer_memory(const std::vector<DeviceFacts>& ranks) {
  for (size_t a = 0; a < ranks.size(); ++a) {
    if (!ranks[a].symmetric_memory) return cat("torch has no symmetric memory for rank ", a, "'s device");
    for (size_t b = 0; b < ranks.size(); ++b) {
      if (a == b) continue;
      if (ranks[a].host != ranks[b].host) return cat("ranks ", a, " and ", b, " are on different hosts");
      if (ranks[a].device == ranks[b].device) {
        if (!ranks[a].shares_devices) return cat("ranks ", a, " and ", b, " share a device");
      } else if (has(ranks[a].seen, ranks[b].device) && !has(ranks[a].reachable, ranks[b].device)) {
        return cat("rank ", a, "'s device cannot reach the memory of rank ", b, "'s");
      }
    }
  }
  return "";
}

std::string against_grouped(const std::vector<DeviceFacts>& ranks) {
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    if (!ranks[rank].grouped) return cat("rank ", rank, "'s process group does not move tensors of its device");
    // NCCL refuses that, unless it is led to believe otherwise; who asks for it knows.
    for (size_t other = 0; other < rank && ranks[rank].wish == DeviceKind::kAuto; ++other) {
      if (ranks[other].host == ranks[rank].host && ranks[other].device == ranks[rank].device) {
        return cat("ranks ", other, " and ", rank, " share a device");
      }
    }
  }
  return "";
}

std::string joined(const std::vector<std::string>& list) {
  std::string out;
  for (const std::string& item : list) out += item + ",";
  return out;
}

std::vector<std::string> split(const std::string& text, char at) {
  std::vector<std::string> out;
  std::istringstream stream(text);
  for (std::string item; std::getline(stream, item, at);) out.push_back(item);
  return out;
}

}  // namespace

const char* name_of(DeviceKind kind) {
  for (const auto& [name, each] : kNames) {
    if (each == kind) return name;
  }
  return "auto";
}

DeviceKind device_kind_of(const std::string& name, const std::string& what) {
  for (const auto& [known, kind] : kNames) {
    if (name == known) return kind;
  }
  throw Error(cat(what, " is auto, peer_memory, grouped, staged or none, not ", name));
}

std::string DeviceFacts::packed() const {
  return cat(host, "\n", device, "\n", joined(seen), "\n", joined(reachable), "\n", symmetric_memory ? 1 : 0, "\n",
             shares_devices ? 1 : 0, "\n", grouped ? 1 : 0, "\n", name_of(wish));
}

DeviceFacts DeviceFacts::unpacked(const std::string& text) {
  const auto lines = split(text, '\n');
  if (lines.size() != 8) throw Error(cat("a rank told ", lines.size(), " facts of its device, not 8"));
  return {lines[0],        lines[1],        split(lines[2], ','), split(lines[3], ','),
          lines[4] == "1", lines[5] == "1", lines[6] == "1",      device_kind_of(lines[7], "a rank's wish")};
}

DeviceChoice choose(const std::vector<DeviceFacts>& ranks, bool without_peer_memory) {
  const DeviceKind wish = ranks.front().wish;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    if (ranks[rank].wish != wish) {
      throw Error(cat("the exchange of halos between devices is to be ", name_of(wish), " on rank 0 and ",
                      name_of(ranks[rank].wish), " on rank ", rank, ": choose the same on all ranks"));
    }
  }
  const std::string peer_memory =
      without_peer_memory ? "torch's symmetric memory could not be set up" : against_peer_memory(ranks);
  const std::string grouped = against_grouped(ranks);
  const auto require = [&](const std::string& obstacle) {
    if (!obstacle.empty()) throw Error(cat("halos cannot travel by ", name_of(wish), ": ", obstacle));
    return DeviceChoice{wish, "chosen"};
  };
  if (wish == DeviceKind::kPeerMemory) return require(peer_memory);
  if (wish == DeviceKind::kGrouped) return require(grouped);
  if (wish != DeviceKind::kAuto) return {wish, "chosen"};
  if (peer_memory.empty()) return {DeviceKind::kPeerMemory, ""};
  if (grouped.empty()) return {DeviceKind::kGrouped, peer_memory};
  return {DeviceKind::kStaged, cat(peer_memory, "; ", grouped)};
}

}  // namespace torchtp::exchange
