"""What of Horovod is not here, and what PyTorch has in its place."""

from __future__ import annotations

_GROUPS = "torch.distributed.new_group(ranks) makes groups of ranks, which torch.distributed's collectives take"
_ELASTIC = "torchrun --max-restarts starts a job's processes again, which then load their last checkpoint"
_TIMELINE = "TORCHTP_TRACE=PATH or torchtp.trace.dump(PATH) write what `torchtp timeline` draws"
_SPARSE = "reduce tensor.to_dense(), or allgather indices and values"

ABSENT = {
    "ProcessSet": _GROUPS,
    "global_process_set": _GROUPS,
    "add_process_set": _GROUPS,
    "remove_process_set": _GROUPS,
    "process_set_included": _GROUPS,
    "get_process_set_ids_and_ranks": _GROUPS,
    "Adasum": "hvd.Average and hvd.Sum are the ops of a DistributedOptimizer",
    "adasum": "hvd.Average and hvd.Sum are the ops of a DistributedOptimizer",
    "SyncBatchNorm": "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) takes statistics of CUDA tensors over all ranks",
    "join": "torch.distributed.algorithms.join.Join runs loops of unequal length",
    "elastic": _ELASTIC,
    "run": "start scripts by torchrun",
    "start_timeline": _TIMELINE,
    "stop_timeline": _TIMELINE,
    "sparse_allreduce_async": _SPARSE,
    "grouped_allgather": "call allgather for each tensor",
    "grouped_allgather_async": "call allgather_async for each tensor",
    "grouped_reducescatter": "call reducescatter for each tensor",
    "grouped_reducescatter_async": "call reducescatter_async for each tensor",
    "check_extension": "torch.distributed is part of PyTorch: nothing is to be checked",
    "check_installed_version": "torch.distributed is part of PyTorch: nothing is to be checked",
}


def refused(name: str) -> AttributeError:
    """What is raised for an attribute that `torchtp.horovod` has not."""
    if name in ABSENT:
        return AttributeError(f"torchtp.horovod has no {name}: {ABSENT[name]}")
    return AttributeError(f"module 'torchtp.horovod' has no attribute {name!r}")
