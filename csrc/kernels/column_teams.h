#pragma once

#include "kernels/block_program.h"

namespace torchtp::kernels {

// For programs that add up columns of numbers: some threads for each column, neighbours for neighbouring columns.
struct ColumnTeams {
  static constexpr int kThreads = 256;
  int log_team = 5, log_apart = 5;
  int team = 32, apart = 32;

  ColumnTeams() = default;
  // Columns of `parts` numbers, of which a thread takes up to `each` where a column may have threads enough.
  ColumnTeams(int64_t parts, int64_t each, int log_most = 5) {
    int log = 0;
    while (log < log_most && (each << log) < parts) ++log;
    log_apart = log < 3 ? 5 : 8 - log;
    log_team = log_apart + log;
    team = 1 << log_team;
    apart = 1 << log_apart;
  }

  TORCHTP_HOST_DEVICE int64_t of_block() const { return int64_t{kThreads} >> log_team << log_apart; }
  TORCHTP_HOST_DEVICE int64_t blocks(int64_t columns) const { return (columns + of_block() - 1) / of_block(); }
  TORCHTP_HOST_DEVICE int64_t column(const Place& place) const {
    return place.block * of_block() + (place.thread >> log_team << log_apart) + (place.thread & (apart - 1));
  }
  // Of the threads of a column which one, and how many there are.
  TORCHTP_HOST_DEVICE int rank(const Place& place) const { return (place.thread & (team - 1)) >> log_apart; }
  TORCHTP_HOST_DEVICE int ranks() const { return team >> log_apart; }
};

}  // namespace torchtp::kernels
