#include "collectives/call.h"

#include <iterator>

namespace torchtp::collectives {

namespace {

constexpr uint8_t kNoReduceOp = 255;

}  // namespace

const char* name_of(Kind kind) {
  static constexpr const char* kNames[] = {"a call refused by its own rank",
                                           "allreduce",
                                           "broadcast",
                                           "allgather",
                                           "reduce_scatter",
                                           "reduce",
                                           "gather",
                                           "scatter",
                                           "alltoall",
                                           "barrier"};
  const auto index = static_cast<size_t>(kind);
  return index < std::size(kNames) ? kNames[index] : "an unknown call";
}

shm::Fingerprint Call::fingerprint(Kind kind, int64_t count, c10::ScalarType dtype, int root) const {
  shm::Fingerprint print{};
  print.sequence = sequence;
  print.kind = static_cast<uint8_t>(kind);
  print.reduce_op = kNoReduceOp;
  print.dtype = static_cast<uint8_t>(dtype);
  print.root = root;
  print.count = count;
  return print;
}

shm::Fingerprint Call::fingerprint(Kind kind, int64_t count, c10::ScalarType dtype, ReduceOp op, int root) const {
  shm::Fingerprint print = fingerprint(kind, count, dtype, root);
  print.reduce_op = static_cast<uint8_t>(op);
  return print;
}

std::string describe(const shm::Fingerprint& print) {
  const auto kind = static_cast<Kind>(print.kind);
  std::string text = name_of(kind);
  if (kind == Kind::kRefused) return text;
  if (kind == Kind::kBarrier) return text + "()";
  text += "(";
  if (print.reduce_op != kNoReduceOp) text += std::string(name_of(static_cast<ReduceOp>(print.reduce_op))) + ", ";
  text += c10::toString(static_cast<c10::ScalarType>(print.dtype));
  if (kind != Kind::kAlltoall) text += ", " + std::to_string(print.count) + " elements";
  if (print.root >= 0) text += ", root " + std::to_string(print.root);
  return text + ")";
}

bool all_in_heap(const shm::Group& group) {
  for (int r = 0; r < group.size(); ++r) {
    if (group.peer_heap_offset(r) < 0) return false;
  }
  return true;
}

}  // namespace torchtp::collectives
