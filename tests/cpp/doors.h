#pragma once

#include <set>

#include "net/connect.h"

namespace torchtp::test {

constexpr char kLoopback[] = "lo";

// To each other rank.
inline std::set<net::Line> lines_of(int rank, int size, int num_uses) {
  std::set<net::Line> lines;
  for (int r = 0; r < size; ++r) {
    for (int use = 0; use < num_uses && r != rank; ++use) lines.insert({r, use});
  }
  return lines;
}

}  // namespace torchtp::test
