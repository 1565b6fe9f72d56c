// The collectives of TorchtpBackend that reduce: each checks its arguments at the door and says what to run.
#include <utility>

#include "backend/arguments.h"
#include "backend/sparse_allreduce.h"
#include "backend/torchtp_backend.h"
#include "collectives/call.h"

namespace torchtp::backend {

using collectives::fingerprint;
using collectives::Kind;

namespace {

// The operation between elements, after what every rank does to its own input.
class Reducing {
 public:
  Reducing(const c10d::ReduceOp& op, const at::Tensor& tensor, const char* what)
      : op_(static_cast<collectives::ReduceOp>(op.op_)) {
    const at::ScalarType dtype = tensor.scalar_type();
    TORCH_CHECK(collectives::is_reducible(dtype, op_), "torchtp ", what, ": reduce op ", collectives::name_of(op_),
                " has no meaning for dtype ", dtype);
    // On a device the inner backend multiplies; reading the factor would wait for the device.
    if (op_ != collectives::ReduceOp::kPremulSum || !tensor.device().is_cpu()) return;
    const auto* supplement = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
    TORCH_CHECK(supplement != nullptr, "torchtp ", what, ": PREMUL_SUM without a factor");
    factor_ =
        supplement->tensor_factor.defined() ? supplement->tensor_factor.item() : at::Scalar(supplement->double_factor);
  }

  collectives::ReduceOp op() const { return op_; }

  Dense load(const at::Tensor& tensor) const {
    if (op_ != collectives::ReduceOp::kPremulSum) return Dense(tensor, true);
    return Dense((tensor * factor_).to(tensor.scalar_type()), true);
  }

 private:
  collectives::ReduceOp op_;
  at::Scalar factor_;
};

// Pieces of other lengths for each rank, one after another: the others' are left as they are.
void reduce_unequal(const Call& call, const std::vector<Dense>& sources, const Dense& result,
                    collectives::ReduceOp op) {
  const int rank = call.engine.rank();
  for (int root = 0; root < call.engine.size(); ++root) {
    const at::Tensor& piece = sources[root].memory();
    if (root == rank) collectives::copy_bytes(result.data(), sources[root].data(), result.num_bytes());
    // Lists of other lengths on other ranks are told as what was called, not as the reduces that it is made of.
    call.engine.agree(fingerprint(call.sequence, Kind::kReduceScatter, piece.numel(), piece.scalar_type(), op, root));
    std::byte* const data = root == rank ? result.data() : sources[root].data();
    call.engine.reduce(call.sequence, data, piece.numel(), piece.scalar_type(), op, root);
  }
}

}  // namespace

TorchtpBackend::Plan TorchtpBackend::plan_allreduce(const char* title, const Tensors& tensors,
                                                    const c10d::ReduceOp& op) const {
  TORCH_CHECK(!tensors.empty(), "torchtp allreduce takes at least one tensor, got none");
  std::vector<Reducing> reducing;
  for (const at::Tensor& tensor : tensors) {
    check_tensor(tensor, "allreduce");
    reducing.emplace_back(op, tensor, "allreduce");
  }
  return {c10d::OpType::ALLREDUCE,
          title,
          tensors,
          tensors,
          fingerprint(0, Kind::kAllreduce, total_numel(tensors), dtype_of(tensors), reducing[0].op()),
          [tensors, reducing](const Call& call) {
            // A tensor that comes twice, or as another's view, is reduced as it was when the call began.
            Tensors copies;
            if (share_memory(tensors)) {
              for (const at::Tensor& tensor : tensors) copies.push_back(tensor.clone());
            }
            for (size_t i = 0; i < tensors.size(); ++i) {
              const at::Tensor& tensor = tensors[i];
              Dense dense = reducing[i].load(copies.empty() ? tensor : copies[i]);
              call.engine.allreduce(call.sequence, dense.data(), tensor.numel(), tensor.scalar_type(),
                                    reducing[i].op());
              overwrite(tensor, dense.memory());
            }
          }};
}

TorchtpBackend::WorkPtr TorchtpBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return launch(
      options.asyncOp, options.timeout,
      [&]() -> Plan {
        TORCH_CHECK(tensors.size() == 1, "torchtp allreduce takes one tensor a rank, got ", tensors.size());
        const at::Tensor tensor = tensors[0];
        if (!tensor.is_sparse()) return plan_allreduce("torchtp:all_reduce", tensors, options.reduceOp);
        const auto op = static_cast<collectives::ReduceOp>(options.reduceOp.op_);
        check_sparse(tensor, op);
        return {c10d::OpType::ALLREDUCE,
                "torchtp:all_reduce",
                tensors,
                tensors,
                fingerprint(0, Kind::kAllreduce, tensor.numel(), tensor.scalar_type(), op),
                [tensor](const Call& call) { sparse_allreduce(call, tensor); }};
      },
      [&](Inner& inner) { return inner.allreduce(tensors, options); });
}

TorchtpBackend::WorkPtr TorchtpBackend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return allreduce(tensors, options);
}

TorchtpBackend::WorkPtr TorchtpBackend::allreduce_coalesced(Tensors& tensors,
                                                            const c10d::AllreduceCoalescedOptions& options) {
  return launch(
      options.asyncOp, options.timeout,
      [&] { return plan_allreduce("torchtp:all_reduce_coalesced", tensors, options.reduceOp); },
      [&](Inner& inner) { return inner.allreduce_coalesced(tensors, options); });
}

TorchtpBackend::WorkPtr TorchtpBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  return launch(
      options.asyncOp, options.timeout,
      [&]() -> Plan {
        const at::Tensor tensor = only(tensors, "reduce");
        check_root(options.rootRank, "reduce");
        const int root = static_cast<int>(options.rootRank);
        const Reducing reducing(options.reduceOp, tensor, "reduce");
        return {c10d::OpType::REDUCE,
                "torchtp:reduce",
                tensors,
                tensors,
                fingerprint(0, Kind::kReduce, tensor.numel(), tensor.scalar_type(), reducing.op(), root),
                [tensor, root, reducing](const Call& call) {
                  Dense dense = reducing.load(tensor);
                  call.engine.reduce(call.sequence, dense.data(), tensor.numel(), tensor.scalar_type(), reducing.op(),
                                     root);
                  if (call.engine.rank() == root) overwrite(tensor, dense.memory());
                }};
      },
      [&](Inner& inner) { return inner.reduce(tensors, options); });
}

TorchtpBackend::WorkPtr TorchtpBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                                       const c10d::ReduceScatterOptions& options) {
  return launch(
      options.asyncOp, options.timeout,
      [&]() -> Plan {
        const at::Tensor output = only(outputs, "reduce_scatter");
        const Tensors list = pieces_of_ranks(inputs, getSize(), getRank(), output, "reduce_scatter");
        const Reducing reducing(options.reduceOp, output, "reduce_scatter");
        const bool equal = all_of_one_length(list);
        const int64_t count = equal ? output.numel() : total_numel(list);
        return {c10d::OpType::REDUCE_SCATTER,
                "torchtp:reduce_scatter",
                outputs,
                list,
                fingerprint(0, Kind::kReduceScatter, count, output.scalar_type(), reducing.op()),
                [output, list, reducing, equal](const Call& call) {
                  std::vector<Dense> sources;
                  std::vector<const std::byte*> pointers;
                  for (const at::Tensor& tensor : list) {
                    sources.push_back(reducing.load(tensor));
                    pointers.push_back(sources.back().data());
                  }
                  Dense result(output, false);
                  result.keep_apart(spans_of(sources), call.engine.rank());
                  if (equal) {
                    call.engine.reduce_scatter(call.sequence, pointers, result.data(), output.numel(),
                                               output.scalar_type(), reducing.op());
                  } else {
                    reduce_unequal(call, sources, result, reducing.op());
                  }
                  result.store();
                }};
      },
      [&](Inner& inner) { return inner.reduce_scatter(outputs, inputs, options); });
}

TorchtpBackend::Plan TorchtpBackend::plan_reduce_scatter_base(const char* title, const Tensors& outputs,
                                                              const Tensors& inputs, const c10d::ReduceOp& op) const {
  check_same_length(outputs, inputs, "reduce_scatter_tensor");
  std::vector<Reducing> reducing;
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_tensor(outputs[i], "reduce_scatter_tensor");
    check_like(inputs[i], outputs[i].numel() * getSize(), outputs[i].scalar_type(), "reduce_scatter_tensor");
    reducing.emplace_back(op, outputs[i], "reduce_scatter_tensor");
  }
  const auto reduce_op = static_cast<collectives::ReduceOp>(op.op_);
  return {c10d::OpType::_REDUCE_SCATTER_BASE,
          title,
          outputs,
          inputs,
          fingerprint(0, Kind::kReduceScatter, total_numel(outputs), dtype_of(outputs), reduce_op),
          [outputs, inputs, reducing](const Call& call) {
            for (size_t i = 0; i < inputs.size(); ++i) {
              const Dense source = reducing[i].load(inputs[i]);
              Dense result(outputs[i], false);
              result.keep_apart(spans_of(source, call.engine.size()), call.engine.rank());
              const std::byte* data = source.data();
              call.engine.reduce_scatter(call.sequence, parts(data, result.num_bytes(), call.engine.size()),
                                         result.data(), outputs[i].numel(), outputs[i].scalar_type(), reducing[i].op());
              result.store();
            }
          }};
}

TorchtpBackend::WorkPtr TorchtpBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                             const c10d::ReduceScatterOptions& options) {
  return launch(
      options.asyncOp, options.timeout,
      [&] { return plan_reduce_scatter_base("torchtp:_reduce_scatter_base", {output}, {input}, options.reduceOp); },
      [&](Inner& inner) { return inner._reduce_scatter_base(output, input, options); });
}

TorchtpBackend::WorkPtr TorchtpBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                        const c10d::ReduceScatterOptions& options) {
  return launch(
      options.asyncOp, options.timeout,
      [&] {
        return plan_reduce_scatter_base("torchtp:reduce_scatter_tensor_coalesced", outputs, inputs, options.reduceOp);
      },
      [&](Inner& inner) { return inner.reduce_scatter_tensor_coalesced(outputs, inputs, options); });
}

}  // namespace torchtp::backend
