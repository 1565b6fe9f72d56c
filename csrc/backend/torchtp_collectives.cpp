// The collectives of TorchtpBackend that move bytes: each checks its arguments at the door and says what to run.
#include <ATen/Context.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "backend/arguments.h"
#include "backend/torchtp_backend.h"
#include "collectives/call.h"

namespace torchtp::backend {

using collectives::fingerprint;
using collectives::Kind;

TorchtpBackend::WorkPtr TorchtpBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return launch(
      options.asyncOp, options.timeout,
      [&]() -> Plan {
        const at::Tensor tensor = only(tensors, "broadcast");
        check_root(options.rootRank, "broadcast");
        const int root = static_cast<int>(options.rootRank);
        return {c10d::OpType::BROADCAST,
                "torchtp:broadcast",
                tensors,
                tensors,
                fingerprint(0, Kind::kBroadcast, tensor.numel(), tensor.scalar_type(), root),
                [tensor, root](const Call& call) {
                  Dense dense(tensor, call.engine.rank() == root);
                  call.engine.broadcast(call.sequence, dense.data(), tensor.numel(), tensor.scalar_type(), root);
                  if (call.engine.rank() != root) dense.store();
                }};
      },
      [&](Inner& inner) { return inner.broadcast(tensors, options); });
}

TorchtpBackend::Plan TorchtpBackend::plan_allgather(const char* title, const TensorLists& outputs,
                                                    const Tensors& inputs) const {
  const at::Tensor input = only(inputs, "allgather");
  const Tensors list = pieces_of_ranks(outputs, getSize(), getRank(), input, "allgather");
  const bool equal = all_of_one_length(list);
  const int64_t count = equal ? input.numel() : total_numel(list);
  return {
      c10d::OpType::ALLGATHER,
      title,
      list,
      inputs,
      fingerprint(0, Kind::kAllgather, count, input.scalar_type()),
      [input, list, equal](const Call& call) {
        Dense source(input, true);
        DenseList gathered(list, false);
        source.keep_apart(gathered.spans(), call.engine.rank());
        const std::vector<std::byte*> pieces = gathered.outputs();
        if (equal) {
          call.engine.allgather(call.sequence, source.data(), pieces, input.numel(), input.scalar_type());
        } else {
          collectives::copy_bytes(pieces[call.engine.rank()], source.data(), source.num_bytes());
          for (int r = 0; r < call.engine.size(); ++r) {
            // Lists of other lengths on other ranks are told as what was called, not as the broadcasts it is made of.
            call.engine.agree(fingerprint(call.sequence, Kind::kAllgather, list[r].numel(), input.scalar_type(), r));
            call.engine.broadcast(call.sequence, pieces[r], list[r].numel(), input.scalar_type(), r);
          }
        }
        gathered.store();
      }};
}

TorchtpBackend::WorkPtr TorchtpBackend::allgather(TensorLists& outputs, Tensors& inputs,
                                                  const c10d::AllgatherOptions& options) {
  return launch(
      options.asyncOp, options.timeout, [&] { return plan_allgather("torchtp:all_gather", outputs, inputs); },
      [&](Inner& inner) { return inner.allgather(outputs, inputs, options); });
}

TorchtpBackend::WorkPtr TorchtpBackend::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                                            const c10d::AllgatherOptions& options) {
  return launch(
      options.asyncOp, options.timeout,
      [&]() -> Plan {
        TORCH_CHECK(static_cast<int>(outputs.size()) == getSize(),
                    "torchtp allgather_coalesced takes one list for each of the ", getSize(), " ranks, got ",
                    outputs.size());
        for (const Tensors& list : outputs) check_same_length(list, inputs, "allgather_coalesced");
        Tensors all;
        std::vector<std::function<void(const Call&)>> bodies;
        for (size_t i = 0; i < inputs.size(); ++i) {
          Tensors list;
          for (const Tensors& of_rank : outputs) list.push_back(of_rank[i]);
          bodies.push_back(plan_allgather("", {list}, {inputs[i]}).body);
        }
        for (const Tensors& list : outputs) all.insert(all.end(), list.begin(), list.end());
        return {c10d::OpType::ALLGATHER_COALESCED,
                "torchtp:all_gather_coalesced",
                all,
                inputs,
                fingerprint(0, Kind::kAllgather, total_numel(inputs), dtype_of(inputs)),
                [bodies](const Call& call) {
                  for (const auto& body : bodies) body(call);
                }};
      },
      [&](Inner& inner) { return inner.allgather_coalesced(outputs, inputs, options); });
}

TorchtpBackend::Plan TorchtpBackend::plan_allgather_base(const char* title, const Tensors& outputs,
                                                         const Tensors& inputs) const {
  check_same_length(outputs, inputs, "all_gather_into_tensor");
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_tensor(inputs[i], "all_gather_into_tensor");
    check_like(outputs[i], inputs[i].numel() * getSize(), inputs[i].scalar_type(), "all_gather_into_tensor");
  }
  return {c10d::OpType::_ALLGATHER_BASE,
          title,
          outputs,
          inputs,
          fingerprint(0, Kind::kAllgather, total_numel(inputs), dtype_of(inputs)),
          [outputs, inputs](const Call& call) {
            for (size_t i = 0; i < inputs.size(); ++i) {
              Dense source(inputs[i], true);
              Dense gathered(outputs[i], false);
              source.keep_apart(spans_of(gathered, call.engine.size()), call.engine.rank());
              call.engine.allgather(call.sequence, source.data(),
                                    parts(gathered.data(), source.num_bytes(), call.engine.size()), inputs[i].numel(),
                                    inputs[i].scalar_type());
              gathered.store();
            }
          }};
}

TorchtpBackend::WorkPtr TorchtpBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                        const c10d::AllgatherOptions& options) {
  return launch(
      options.asyncOp, options.timeout,
      [&] { return plan_allgather_base("torchtp:_all_gather_base", {output}, {input}); },
      [&](Inner& inner) { return inner._allgather_base(output, input, options); });
}

TorchtpBackend::WorkPtr TorchtpBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                        const c10d::AllgatherOptions& options) {
  return launch(
      options.asyncOp, options.timeout,
      [&] { return plan_allgather_base("torchtp:all_gather_into_tensor_coalesced", outputs, inputs); },
      [&](Inner& inner) { return inner.allgather_into_tensor_coalesced(outputs, inputs, options); });
}

TorchtpBackend::WorkPtr TorchtpBackend::gather(TensorLists& outputs, Tensors& inputs,
                                               const c10d::GatherOptions& options) {
  return launch(
      options.asyncOp, options.timeout,
      [&]() -> Plan {
        const at::Tensor input = only(inputs, "gather");
        check_root(options.rootRank, "gather");
        const int root = static_cast<int>(options.rootRank);
        Tensors list;
        if (getRank() == root) {
          list = one_for_each_rank(outputs, getSize(), input, "gather");
        } else {
          check_no_lists(outputs, "gather");
        }
        return {c10d::OpType::GATHER,
                "torchtp:gather",
                list,
                inputs,
                fingerprint(0, Kind::kGather, input.numel(), input.scalar_type(), root),
                [input, list, root](const Call& call) {
                  Dense source(input, true);
                  DenseList gathered(list, false);
                  source.keep_apart(gathered.spans(), root);
                  call.engine.gather(call.sequence, source.data(), gathered.outputs(), input.numel(),
                                     input.scalar_type(), root);
                  gathered.store();
                }};
      },
      [&](Inner& inner) { return inner.gather(outputs, inputs, options); });
}

#ifdef C10D_BACKEND_HAS_HOOKS
TorchtpBackend::WorkPtr TorchtpBackend::gather_into_tensor(at::Tensor& output, at::Tensor& input,
                                                           const c10d::GatherOptions& options) {
  return launch(
      options.asyncOp, options.timeout,
      [&]() -> Plan {
        check_tensor(input, "gather_into_tensor");
        check_root(options.rootRank, "gather_into_tensor");
        const int root = static_cast<int>(options.rootRank);
        const bool is_root = getRank() == root;
        if (is_root) check_like(output, input.numel() * getSize(), input.scalar_type(), "gather_into_tensor");
        const at::Tensor source_tensor = input;
        const Tensors outputs = is_root ? Tensors{output} : Tensors{};
        return {c10d::OpType::GATHER,
                "torchtp:gather",
                outputs,
                {input},
                fingerprint(0, Kind::kGather, input.numel(), input.scalar_type(), root),
                [source_tensor, outputs, root](const Call& call) {
                  Dense source(source_tensor, true);
                  DenseList gathered(outputs, false);
                  std::vector<std::byte*> pointers;
                  if (!outputs.empty()) {
                    source.keep_apart(spans_of(gathered.all()[0], call.engine.size()), root);
                    pointers = parts(gathered.outputs()[0], source.num_bytes(), call.engine.size());
                  }
                  call.engine.gather(call.sequence, source.data(), pointers, source_tensor.numel(),
                                     source_tensor.scalar_type(), root);
                  gathered.store();
                }};
      },
      [&](Inner& inner) { return inner.gather_into_tensor(output, input, options); });
}
#endif

TorchtpBackend::WorkPtr TorchtpBackend::scatter(Tensors& outputs, TensorLists& inputs,
                                                const c10d::ScatterOptions& options) {
  return launch(
      options.asyncOp, options.timeout,
      [&]() -> Plan {
        const at::Tensor output = only(outputs, "scatter");
        check_root(options.rootRank, "scatter");
        const int root = static_cast<int>(options.rootRank);
        Tensors list;
        if (getRank() == root) {
          list = one_for_each_rank(inputs, getSize(), output, "scatter");
        } else {
          check_no_lists(inputs, "scatter");
        }
        return {c10d::OpType::SCATTER,
                "torchtp:scatter",
                outputs,
                list,
                fingerprint(0, Kind::kScatter, output.numel(), output.scalar_type(), root),
                [output, list, root](const Call& call) {
                  const DenseList sources(list, true);
                  Dense result(output, false);
                  result.keep_apart(sources.spans(), root);
                  call.engine.scatter(call.sequence, sources.inputs(), result.data(), output.numel(),
                                      output.scalar_type(), root);
                  result.store();
                }};
      },
      [&](Inner& inner) { return inner.scatter(outputs, inputs, options); });
}

TorchtpBackend::WorkPtr TorchtpBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                      std::vector<int64_t>& output_splits,
                                                      std::vector<int64_t>& input_splits,
                                                      const c10d::AllToAllOptions& options) {
  return launch(
      options.asyncOp, options.timeout,
      [&]() -> Plan {
        check_tensor(input, "all_to_all_single");
        check_tensor(output, "all_to_all_single");
        TORCH_CHECK(input.scalar_type() == output.scalar_type(),
                    "torchtp all_to_all_single: all tensors of a call must have one dtype, got ", input.scalar_type(),
                    " and ", output.scalar_type());
        // Rows for each rank: as given, or equal parts.
        const auto rows_of = [this](const at::Tensor& tensor, std::vector<int64_t> splits, const char* name) {
          const int64_t rows = tensor.dim() == 0 ? tensor.numel() : tensor.size(0);
          if (splits.empty()) {
            TORCH_CHECK(rows % getSize() == 0, "torchtp all_to_all_single: ", rows, " rows of ", name,
                        " cannot be cut in equal parts for ", getSize(), " ranks; pass split sizes");
            splits.assign(getSize(), rows / getSize());
          }
          const bool possible =
              static_cast<int>(splits.size()) == getSize() &&
              std::all_of(splits.begin(), splits.end(), [rows](int64_t each) { return 0 <= each && each <= rows; }) &&
              std::accumulate(splits.begin(), splits.end(), int64_t{0}) == rows;
          TORCH_CHECK(possible, "torchtp all_to_all_single: ", name, " split sizes must be one for each of the ",
                      getSize(), " ranks, none negative, and sum up to its ", rows, " rows, got ",
                      c10::IntArrayRef(splits));
          return splits;
        };
        const std::vector<int64_t> to = rows_of(input, input_splits, "input");
        const std::vector<int64_t> from = rows_of(output, output_splits, "output");
        const at::Tensor source_tensor = input;
        const at::Tensor result_tensor = output;
        return {c10d::OpType::ALLTOALL_BASE,
                "torchtp:all_to_all",
                {output},
                {input},
                fingerprint(0, Kind::kAlltoall, 0, input.scalar_type()),
                [source_tensor, result_tensor, to, from](const Call& call) {
                  const Dense source(source_tensor, true);
                  Dense result(result_tensor, false);
                  const auto row_bytes = [](const at::Tensor& tensor) {
                    const int64_t rows = tensor.dim() == 0 ? tensor.numel() : tensor.size(0);
                    return rows == 0 ? size_t{0} : tensor.nbytes() / rows;
                  };
                  const int size = call.engine.size();
                  result.keep_apart({source.span()}, kNowhere);
                  std::vector<const std::byte*> inputs(size);
                  std::vector<std::byte*> outputs(size);
                  std::vector<size_t> send_bytes(size), receive_bytes(size);
                  const std::byte* in = source.data();
                  std::byte* out = result.data();
                  for (int r = 0; r < size; ++r) {
                    inputs[r] = in;
                    outputs[r] = out;
                    in += send_bytes[r] = to[r] * row_bytes(source_tensor);
                    out += receive_bytes[r] = from[r] * row_bytes(result_tensor);
                  }
                  call.engine.alltoall(call.sequence, inputs, send_bytes, outputs, receive_bytes,
                                       source_tensor.scalar_type());
                  result.store();
                }};
      },
      [&](Inner& inner) { return inner.alltoall_base(output, input, output_splits, input_splits, options); });
}

TorchtpBackend::WorkPtr TorchtpBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                                 const c10d::AllToAllOptions& options) {
  return launch(
      options.asyncOp, options.timeout,
      [&]() -> Plan {
        TORCH_CHECK(static_cast<int>(inputs.size()) == getSize() && static_cast<int>(outputs.size()) == getSize(),
                    "torchtp all_to_all takes one input and one output for each of the ", getSize(), " ranks, got ",
                    inputs.size(), " and ", outputs.size());
        const at::ScalarType dtype = inputs[0].scalar_type();
        for (const Tensors* list : {&inputs, &outputs}) {
          for (const at::Tensor& tensor : *list) check_like(tensor, tensor.numel(), dtype, "all_to_all");
        }
        return {c10d::OpType::ALLTOALL,
                "torchtp:all_to_all",
                outputs,
                inputs,
                fingerprint(0, Kind::kAlltoall, 0, dtype),
                [outputs = outputs, inputs = inputs, dtype](const Call& call) {
                  const DenseList sources(inputs, true);
                  DenseList results(outputs, false);
                  for (Dense& each : results.all()) each.keep_apart(sources.spans(), kNowhere);
                  std::vector<size_t> send_bytes, receive_bytes;
                  for (const at::Tensor& tensor : inputs) send_bytes.push_back(tensor.nbytes());
                  for (const at::Tensor& tensor : outputs) receive_bytes.push_back(tensor.nbytes());
                  call.engine.alltoall(call.sequence, sources.inputs(), send_bytes, results.outputs(), receive_bytes,
                                       dtype);
                  results.store();
                }};
      },
      [&](Inner& inner) { return inner.alltoall(outputs, inputs, options); });
}

// Of the ranks, and of a device's streams too where one is named.
TorchtpBackend::WorkPtr TorchtpBackend::barrier(const c10d::BarrierOptions& options) {
  return launch(
      options.asyncOp, options.timeout,
      [&]() -> Plan {
        Plan plan{c10d::OpType::BARRIER,
                  "torchtp:barrier",
                  {},
                  {},
                  fingerprint(0, Kind::kBarrier, 0, at::ScalarType::Undefined),
                  [](const Call& call) { call.engine.barrier(call.sequence); }};
        // torch.distributed.barrier(device_ids=...) names the accelerator of this machine, which may be the CPU.
        if (!options.device_ids.empty() && at::hasCUDA()) plan.device = at::Device(at::kCUDA, options.device_ids[0]);
        if (options.device) plan.device = *options.device;
        return plan;
      },
      [&](Inner& inner) { return inner.barrier(options); });
}

void TorchtpBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) {
  launch(false, options.timeout, [&]() -> Plan {
    return {c10d::OpType::BARRIER,
            "torchtp:monitored_barrier",
            {},
            {},
            fingerprint(0, Kind::kBarrier, 0, at::ScalarType::Undefined),
            [wait_all_ranks](const Call& call) { call.engine.monitored_barrier(call.sequence, wait_all_ranks); }};
  })->wait();
}

}  // namespace torchtp::backend
