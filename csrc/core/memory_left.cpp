#include "core/memory_left.h"

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <limits>
#include <map>
#include <sstream>

#include "core/format.h"

namespace torchtp {

namespace {

// What the process needs besides, to say that there is no more.
constexpr int64_t kMargin = int64_t{8} << 20;

constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max() / 2;

// A version of cgroups: what its files are called.
struct Names {
  const char *limit, *usage, *swap_limit, *swap_usage, *reclaimable[3];
};

// In version 1 "swap" is memory and swap together.
constexpr Names kOne = {"memory.limit_in_bytes",
                        "memory.usage_in_bytes",
                        "memory.memsw.limit_in_bytes",
                        "memory.memsw.usage_in_bytes",
                        {"total_inactive_file", "total_active_file", ""}};
constexpr Names kTwo = {"memory.max",
                        "memory.current",
                        "memory.swap.max",
                        "memory.swap.current",
                        {"inactive_file", "active_file", "slab_reclaimable"}};

// The number in a file of one number, or `otherwise`: where there is no such file, or a word stands in it ("max").
int64_t number_in(const std::string& path, int64_t otherwise) {
  std::ifstream file(path);
  int64_t value = 0;
  return file >> value ? value : otherwise;
}

int64_t difference_of(const std::string& limit, const std::string& usage) {
  const int64_t most = number_in(limit, kUnlimited);
  return most < kUnlimited ? most - number_in(usage, 0) : kUnlimited;  // version 1 says "no limit" by a number
}

// Lines of a name and a number.
std::map<std::string, int64_t> table_in(const std::string& path) {
  std::ifstream file(path);
  std::map<std::string, int64_t> table;
  std::string line, name;
  for (int64_t value = 0; std::getline(file, line);) {
    if (std::istringstream(line) >> name >> value) table[name] = value;
  }
  return table;
}

// Where the controller of memory is mounted and which group below is this process' own.
struct Place {
  const Names* names = nullptr;
  std::string mount, group;
};

// The field of a line that is split at `separator`, counted from 0.
std::string field(const std::string& line, int index, char separator) {
  std::istringstream text(line);
  std::string found;
  for (int i = 0; i <= index; ++i) {
    if (!std::getline(text, found, separator)) return "";
  }
  return found;
}

bool has_item(const std::string& list, const std::string& item) {
  return ("," + list + ",").find("," + item + ",") != std::string::npos;
}

// Version 1 if it has the controller of memory, as where both are mounted.
Place find_place(const std::string& root) {
  std::string one, two, line;
  for (std::ifstream file(root + "/proc/self/cgroup"); std::getline(file, line);) {
    const size_t second = line.find(':', line.find(':') + 1);
    if (second == std::string::npos) continue;
    if (has_item(field(line, 1, ':'), "memory")) one = line.substr(second + 1);
    if (line.compare(0, 3, "0::") == 0) two = line.substr(second + 1);
  }
  Place place;
  const bool is_one = !one.empty();
  for (std::ifstream file(root + "/proc/self/mountinfo"); std::getline(file, line);) {
    const size_t dash = line.find(" - ");
    if (dash == std::string::npos) continue;
    const std::string kind = field(line.substr(dash + 3), 0, ' '), options = field(line.substr(dash + 3), 2, ' ');
    if (is_one ? kind != "cgroup" || !has_item(options, "memory") : kind != "cgroup2") continue;
    const std::string shown =
        field(line, 3, ' ');  // what part of the hierarchy lies at the mount: a container's, or "/"
    place = {is_one ? &kOne : &kTwo, root + field(line, 4, ' '), is_one ? one : two};
    if (place.group.compare(0, shown.size(), shown) == 0) place.group.erase(0, shown.size() - (shown == "/"));
  }
  return place;
}

// What is left in one cgroup, whose pages may be swapped out to `free_swap` bytes; kUnlimited when it is `enough`
// anyhow.
int64_t left_in(const std::string& folder, const Names& names, int64_t free_swap, int64_t enough) {
  const int64_t left = difference_of(folder + names.limit, folder + names.usage);
  const int64_t swap_left = difference_of(folder + names.swap_limit, folder + names.swap_usage);
  const bool together = &names == &kOne;                                         // memory and swap have one limit
  if (std::min(left, together ? swap_left : left) >= enough) return kUnlimited;  // most often, and cheap
  const auto table = table_in(folder + "memory.stat");
  int64_t reclaimable = 0;
  for (const char* name : names.reclaimable) {
    if (const auto found = table.find(name); found != table.end()) reclaimable += found->second;
  }
  if (together) return std::min(left + free_swap, swap_left) + reclaimable;
  return left + reclaimable + std::clamp<int64_t>(swap_left, 0, free_swap);
}

std::string too_little(const std::string& where, int64_t left) {
  return cat(where, " has ", grouped(std::max<int64_t>(left, 0)), " bytes left");
}

}  // namespace

std::string lack_of_memory(size_t num_bytes, const std::string& root) {
  const int64_t enough = static_cast<int64_t>(std::min<size_t>(num_bytes, kUnlimited / 2)) + kMargin;
  const auto machine = table_in(root + "/proc/meminfo");
  const auto available = machine.find("MemAvailable:"), swap = machine.find("SwapFree:");
  const int64_t free_swap = swap == machine.end() ? 0 : swap->second << 10;
  if (available != machine.end()) {
    const int64_t left = (available->second << 10) + free_swap;
    if (left < enough) return too_little("the machine", left);
  }
  Place place = find_place(root);
  if (!place.names) return "";
  while (true) {
    const int64_t left = left_in(place.mount + place.group + "/", *place.names, free_swap, enough);
    if (left < enough) return too_little("cgroup " + (place.group.empty() ? "/" : place.group), left);
    if (place.group.empty()) return "";
    place.group.erase(place.group.rfind('/') == std::string::npos ? 0 : place.group.rfind('/'));
  }
}

}  // namespace torchtp
