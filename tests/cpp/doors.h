#pragma once

#include <chrono>
#include <map>
#include <set>
#include <utility>

#include "net/connect.h"
#include "ranks.h"

namespace torchtp::test {

constexpr char kLoopback[] = "lo";
const auto kSoon = std::chrono::seconds(60);

// To each other rank.
inline std::set<net::Line> lines_of(int rank, int size, int num_uses) {
  std::set<net::Line> lines;
  for (int r = 0; r < size; ++r) {
    for (int use = 0; use < num_uses && r != rank; ++use) lines.insert({r, use});
  }
  return lines;
}

// Of `num_uses` to each other rank the last.
inline std::map<int, Fd> connections(shm::Bootstrap& bootstrap, int num_uses) {
  const net::Door door(kLoopback);
  const auto lines = lines_of(bootstrap.rank(), bootstrap.size(), num_uses);
  const auto introductions = bootstrap.all_gather(door.introduction());
  std::map<int, Fd> connections;
  for (auto& [line, socket] : door.connect(bootstrap.rank(), lines, introductions, Deadline(kSoon))) {
    if (line.use == num_uses - 1) connections[line.peer] = std::move(socket);
  }
  bootstrap.all_gather("");
  return connections;
}

}  // namespace torchtp::test
