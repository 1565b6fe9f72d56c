#include "backend/comms_event.h"

#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>

#include <tuple>

namespace torchtp::backend {

namespace {

// As NCCL's process group calls them, which is what programs that read traces know.
const char* traced_name(c10d::OpType op) {
  using c10d::OpType;
  switch (op) {
    case OpType::ALLGATHER:
      return "all_gather";
    case OpType::_ALLGATHER_BASE:
      return "_allgather_base";
    case OpType::ALLGATHER_COALESCED:
      return "all_gather_into_tensor_coalesced";
    case OpType::_REDUCE_SCATTER_BASE:
      return "_reduce_scatter_base";
    case OpType::ALLREDUCE_COALESCED:
      return "allreduce_coalesced";
    case OpType::ALLTOALL_BASE:
      return "all_to_allv";
    case OpType::ALLTOALL:
      return "all_to_all";
    default:
      return name_of(op);
  }
}

bool is_message(c10d::OpType op) { return c10d::isP2POp(op); }

}  // namespace

const char* name_of(c10d::OpType op) {
  using c10d::OpType;
  switch (op) {
    case OpType::BROADCAST:
      return "broadcast";
    case OpType::ALLREDUCE:
    case OpType::ALLREDUCE_COALESCED:
    case OpType::_ALLREDUCE_SPARSE:
      return "allreduce";
    case OpType::REDUCE:
      return "reduce";
    case OpType::ALLGATHER:
    case OpType::_ALLGATHER_BASE:
    case OpType::ALLGATHER_COALESCED:
      return "allgather";
    case OpType::GATHER:
      return "gather";
    case OpType::SCATTER:
      return "scatter";
    case OpType::REDUCE_SCATTER:
    case OpType::_REDUCE_SCATTER_BASE:
      return "reduce_scatter";
    case OpType::ALLTOALL_BASE:
    case OpType::ALLTOALL:
      return "alltoall";
    case OpType::SEND:
      return "send";
    case OpType::RECV:
      return "recv";
    case OpType::RECVANYSOURCE:
      return "recvAnySource";
    case OpType::BARRIER:
      return "barrier";
    default:
      return "call";
  }
}

Volume::Volume(const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors) {
    num_elements += tensor.numel();
    if (tensor.layout() == at::kStrided) num_bytes += static_cast<int64_t>(tensor.nbytes());
  }
  if (!tensors.empty()) dtype = tensors[0].scalar_type();
}

// In this order: the event ends before what describes it.
struct CommsEvent::Open {
  Open(std::shared_ptr<torch::ParamCommsDebugInfo> info, std::vector<c10::IValue> told)
      : guard(c10::DebugInfoKind::PARAM_COMMS_INFO, std::move(info)), inputs(std::move(told)) {}

  c10::DebugInfoGuard guard;
  const std::vector<c10::IValue> inputs;
  at::RecordFunction event{at::RecordScope::FUNCTION};
};

struct CommsEvent::Told {
  const char* name;
  uint64_t sequence;
  bool is_message;
  bool asynchronous;
  at::ScalarType dtype;
  int64_t num_elements_in, num_elements_out;
  std::vector<at::Tensor> inputs, outputs;
};

CommsEvent::CommsEvent(const Recorder::Identity& group, const std::string& description, const CommsCall& call) {
  if (!at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION)) return;
  const Volume in(call.inputs), out(call.outputs);
  begin(group, description,
        {traced_name(call.op), call.sequence, is_message(call.op), call.asynchronous,
         call.inputs.empty() ? out.dtype : in.dtype, in.num_elements, out.num_elements, call.inputs, call.outputs});
}

CommsEvent::CommsEvent(const Recorder::Identity& group, const std::string& description, const HaloCall& call) {
  if (!at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION)) return;
  begin(group, description,
        {"halo", call.sequence, true, false, at::ScalarType::Byte, call.sent_bytes, call.received_bytes, {}, {}});
}

void CommsEvent::begin(const Recorder::Identity& group, const std::string& description, const Told& call) {
  const auto sequence = std::make_tuple(static_cast<int64_t>(call.sequence), call.is_message);
  const auto name = std::make_tuple(group.group, description);
  const std::vector<int64_t> no_splits;
  const auto& ranks = group.global_ranks;
  const int start = ranks.empty() ? 0 : static_cast<int>(ranks.front());
  const int stride = ranks.size() < 2 ? 1 : static_cast<int>(ranks[1] - ranks[0]);
  auto info = std::make_shared<torch::ParamCommsDebugInfo>(name, group.rank, call.name, call.num_elements_in,
                                                           call.num_elements_out, call.dtype, no_splits, no_splits,
                                                           start, stride, group.size
#ifdef RECORD_PARAM_COMMS_DATA_WITH_ASYNC_OP  // new in torch 2.13
                                                           ,
                                                           call.asynchronous
#endif
  );
#ifdef RECORD_PARAM_COMMS_DATA_WITH_ASYNC_OP
  torch::maybeSetSequenceInfo(info, sequence);
#endif
  open_ = std::make_unique<Open>(std::move(info),
                                 std::vector<c10::IValue>{call.inputs, sequence, name, group.rank, call.name, no_splits,
                                                          no_splits, start, stride, group.size, call.asynchronous});
  if (!open_->event.isActive()) return;
  if (open_->event.needsInputs()) {
    const c10::ArrayRef<const c10::IValue> inputs(open_->inputs.data(), open_->inputs.size());
    open_->event.before(at::kParamCommsCallName, inputs);
  } else {
    open_->event.before(at::kParamCommsCallName);
  }
  if (open_->event.needsOutputs()) open_->event.setOutputs(std::vector<c10::IValue>(1, c10::IValue(call.outputs)));
}

CommsEvent::~CommsEvent() = default;

}  // namespace torchtp::backend
