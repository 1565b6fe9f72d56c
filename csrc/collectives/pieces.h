#pragma once

#include <vector>

#include "collectives/call.h"

namespace torchtp::collectives {

// The halves of an allreduce over pieces that need not be equal, each owned by a rank. What a hierarchy is made of:
// between the halves the owners do something with their pieces.

// One piece: `count` elements at `input`, which may be `output`.
struct Piece {
  const std::byte* input;
  std::byte* output;
  int64_t count;
  int owner;
};

// Pieces that lie one behind the other in every rank's heap are read where they lie.

// output of each piece becomes its input of all ranks, reduced in rank order; on the piece's owner alone.
void reduce_pieces(const Call& call, const shm::Fingerprint& print, const std::vector<Piece>& pieces,
                   c10::ScalarType dtype, ReduceOp op);

// output of each piece becomes the owner's input, on every rank.
void spread_pieces(const Call& call, const shm::Fingerprint& print, const std::vector<Piece>& pieces,
                   c10::ScalarType dtype);

}  // namespace torchtp::collectives
