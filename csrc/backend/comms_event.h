#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "backend/record.h"

namespace torchtp::backend {

// The name of an op in statistics, traces and messages: "allreduce".
const char* name_of(c10d::OpType op);

// Elements and bytes of tensors together, and the dtype of the first.
struct Volume {
  explicit Volume(const std::vector<at::Tensor>& tensors);
  int64_t num_elements = 0;
  int64_t num_bytes = 0;
  at::ScalarType dtype = at::ScalarType::Byte;
};

// What a call tells torch.profiler.
struct CommsCall {
  c10d::OpType op;
  uint64_t sequence;
  bool asynchronous;
  const std::vector<at::Tensor>& inputs;
  const std::vector<at::Tensor>& outputs;
};

// What an exchange of halos tells it. They are called "halo", in bytes.
struct HaloCall {
  uint64_t sequence;
  int64_t sent_bytes;
  int64_t received_bytes;
};

// While it lives torch.profiler shows a "record_param_comms" event with the call's name, sizes, dtype, group and
// sequence, as NCCL's calls have it, so that the same programs can read it. Nothing when nobody is profiling.
class CommsEvent {
 public:
  CommsEvent(const Recorder::Identity& group, const std::string& description, const CommsCall& call);
  CommsEvent(const Recorder::Identity& group, const std::string& description, const HaloCall& call);
  ~CommsEvent();
  CommsEvent(const CommsEvent&) = delete;
  CommsEvent& operator=(const CommsEvent&) = delete;

 private:
  struct Open;
  struct Told;

  void begin(const Recorder::Identity& group, const std::string& description, const Told& told);

  std::unique_ptr<Open> open_;
};

}  // namespace torchtp::backend
