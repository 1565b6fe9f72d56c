#include "collectives/call.h"

#include <iterator>

#include "core/format.h"

namespace torchtp::collectives {

namespace {

constexpr uint8_t kNoReduceOp = 255;

// fp32, bf16, int64, bool, complex64.
std::string short_name(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::ScalarType::Double:
      return "fp64";
    case c10::ScalarType::Float:
      return "fp32";
    case c10::ScalarType::Half:
      return "fp16";
    case c10::ScalarType::BFloat16:
      return "bf16";
    case c10::ScalarType::Byte:
      return "uint8";
    case c10::ScalarType::Char:
      return "int8";
    case c10::ScalarType::Short:
      return "int16";
    case c10::ScalarType::Int:
      return "int32";
    case c10::ScalarType::Long:
      return "int64";
    case c10::ScalarType::Bool:
      return "bool";
    case c10::ScalarType::ComplexFloat:
      return "complex64";
    case c10::ScalarType::ComplexDouble:
      return "complex128";
    default:
      return c10::toString(dtype);
  }
}

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

shm::Fingerprint fingerprint(uint64_t sequence, Kind kind, int64_t count, c10::ScalarType dtype, int root) {
  shm::Fingerprint print{};
  print.sequence = sequence;
  print.kind = static_cast<uint8_t>(kind);
  print.reduce_op = kNoReduceOp;
  print.dtype = static_cast<uint8_t>(dtype);
  print.root = root;
  print.count = count;
  return print;
}

shm::Fingerprint fingerprint(uint64_t sequence, Kind kind, int64_t count, c10::ScalarType dtype, ReduceOp op,
                             int root) {
  shm::Fingerprint print = fingerprint(sequence, kind, count, dtype, root);
  print.reduce_op = static_cast<uint8_t>(op);
  return print;
}

const char* reduce_op_of(const shm::Fingerprint& print) {
  return print.reduce_op == kNoReduceOp ? "" : name_of(static_cast<ReduceOp>(print.reduce_op));
}

std::string describe_contents(const Contents& contents) {
  const auto dtype = static_cast<c10::ScalarType>(contents.dtype);
  return dtype == c10::ScalarType::Byte ? in_bytes(contents) : cat(in_bytes(contents), " of ", short_name(dtype));
}

std::string describe(const shm::Fingerprint& print, const std::string& label) {
  if (print.kind == shm::kMaking) return "the making of the group";
  const auto kind = static_cast<Kind>(print.kind);
  if (kind == Kind::kRefused)
    return cat("call #", print.sequence, ", which it refused itself (its own error says why)");
  std::string details;
  const auto add = [&](const std::string& detail) { details += (details.empty() ? "" : ", ") + detail; };
  if (kind != Kind::kBarrier) {
    if (print.reduce_op != kNoReduceOp) add(name_of(static_cast<ReduceOp>(print.reduce_op)));
    add(short_name(static_cast<c10::ScalarType>(print.dtype)));
    if (kind != Kind::kAlltoall) add(grouped(print.count) + " elements");
    if (print.root >= 0) add("root " + std::to_string(print.root));
  }
  if ((print.flags & kOnDevice) != 0) add("on a device");
  if (!label.empty()) add(label);
  return cat(name_of(kind), " #", print.sequence, details.empty() ? "" : " (" + details + ")");
}

bool all_in_heap(const shm::Group& group) {
  for (int r = 0; r < group.size(); ++r) {
    if (group.peer_heap_offset(r) < 0) return false;
  }
  return true;
}

}  // namespace torchtp::collectives
