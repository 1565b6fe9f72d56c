"""What travels as it is: `allgather`, `broadcast`, `alltoall`, and objects."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from torchtp.faults import agreed, fault_of
from torchtp.horovod.common import (
    Handle,
    check_root,
    check_rows,
    check_started,
    check_tensor,
    checked,
    synchronize,
)
from torchtp.horovod.derivatives import differentiable
from torchtp.horovod.reductions import allreduce


def _check_rows_of(caller: str, verb: str, tensor: torch.Tensor) -> None:
    check_tensor(caller, tensor)
    if not tensor.dim():
        raise ValueError(f"{caller}: a tensor of no dims has no dim 0 to {verb}: give tensor.reshape(1)")


def allgather_async(tensor: torch.Tensor, name: str | None = None) -> Handle:
    """Start to concatenate all ranks' tensors along dim 0, in which they may differ; sizes are exchanged at once.

    Raises ValueError on all ranks where dtypes or other dims differ, for a tensor of no dims, and before `init`;
    TypeError on all ranks for what is no dense tensor.
    """
    return _start_allgather(tensor)[0]


@torch.no_grad()
def _start_allgather(tensor: torch.Tensor) -> tuple[Handle, list[int]]:
    """The operation, and how many rows each rank has."""
    check_started("allgather")
    fault = fault_of(lambda: _check_rows_of("allgather", "concatenate along", tensor))
    facts = agreed(fault, None if fault else (str(tensor.dtype), tuple(tensor.shape)))
    check_rows("allgather", facts)
    lengths = [shape[0] for _, shape in facts]
    padded = tensor.new_zeros(max(lengths), *tensor.shape[1:])
    if not padded.numel():
        empty = tensor.new_zeros(sum(lengths), *tensor.shape[1:])
        return Handle([], lambda: empty), lengths
    padded[: tensor.size(0)] = tensor.detach()
    gathered = [torch.empty_like(padded) for _ in lengths]
    work = dist.all_gather(gathered, padded, async_op=True)

    def finish() -> torch.Tensor:
        return torch.cat([part[:length] for part, length in zip(gathered, lengths, strict=True)])

    return Handle([work], finish), lengths


def allgather(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """Concatenation of all ranks' tensors along dim 0, in which they may differ; see `allgather_async`.

    Its gradient is, as Horovod's, this rank's rows of the mean of all ranks' gradients, which all ranks join.
    """
    lengths: list[int] = []

    def gather(tensor: torch.Tensor) -> torch.Tensor:
        handle, of_ranks = _start_allgather(tensor)
        lengths.extend(of_ranks)
        return synchronize(handle)

    def derivative(grad: torch.Tensor) -> list[torch.Tensor]:
        rank = dist.get_rank()
        return [allreduce(grad).narrow(0, sum(lengths[:rank]), lengths[rank])]

    return differentiable(gather, derivative, tensor)


def _check_broadcast(tensor: Any, root_rank: int) -> None:
    def check() -> None:
        check_tensor("broadcast", tensor)
        check_root("broadcast", root_rank)

    check_started("broadcast")
    checked(check)


def _broadcast_in_place(tensor: torch.Tensor, root_rank: int) -> Handle:
    message = tensor.detach().resolve_conj().contiguous()
    work = dist.broadcast(message, root_rank, async_op=True)

    def finish() -> torch.Tensor:
        if message.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(message)
        return tensor

    return Handle([work], finish)


def broadcast_async_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> Handle:
    """Start to overwrite `tensor` by that of `root_rank`; ValueError for a root that is no rank, TypeError for no dense tensor."""
    _check_broadcast(tensor, root_rank)
    return _broadcast_in_place(tensor, root_rank)


def broadcast_async(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> Handle:
    """Like `broadcast_async_`, into a new tensor."""
    _check_broadcast(tensor, root_rank)
    return _broadcast_in_place(tensor.detach().clone(), root_rank)


def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Overwrite `tensor` by that of `root_rank` and return it; see `broadcast_async_`."""
    return synchronize(broadcast_async_(tensor, root_rank, name))


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """The tensor of `root_rank`, in a new one; see `broadcast_async_`.

    Its gradient is, as Horovod's, the mean of all ranks' gradients on `root_rank`, and 0 on the others; all ranks join.
    """

    def derivative(grad: torch.Tensor) -> list[torch.Tensor]:
        mean = allreduce(grad)
        # Not zeros that depend on nothing: all ranks go through a second backward, too.
        return [mean.masked_fill(torch.tensor(dist.get_rank() != root_rank, device=mean.device), 0)]

    return differentiable(lambda each: synchronize(broadcast_async(each, root_rank, name)), derivative, tensor)


def _split_of(tensor: torch.Tensor, splits: torch.Tensor | Sequence[int] | None) -> list[int]:
    """How many rows go to each rank."""
    _check_rows_of("alltoall", "cut", tensor)
    rows, size = tensor.size(0), dist.get_world_size()
    if splits is None:
        if rows % size:
            raise ValueError(
                f"alltoall: without splits dim 0 is cut evenly, but {rows} rows are not a multiple of {size} ranks: give splits"
            )
        return [rows // size] * size
    given = splits.tolist() if isinstance(splits, torch.Tensor) else splits
    if not isinstance(given, Sequence) or not all(isinstance(rows, int) for rows in given):
        raise TypeError(f"alltoall: splits is a list or a tensor [ranks] of integers, but it is {splits!r}")
    if len(given) != size or min(given) < 0 or sum(given) != rows:
        raise ValueError(
            f"alltoall: splits tells how many of the {rows} rows go to each of the {size} ranks, but it is {list(given)}"
        )
    return list(given)


def alltoall_async(
    tensor: torch.Tensor, splits: torch.Tensor | Sequence[int] | None = None, name: str | None = None
) -> Handle:
    """Start to send `splits[r]` rows of `tensor` to each rank r, an equal number without; see `alltoall`."""
    return _start_alltoall(tensor, splits)[0]


@torch.no_grad()
def _start_alltoall(tensor: torch.Tensor, splits: torch.Tensor | Sequence[int] | None) -> tuple[Handle, list[int]]:
    """The operation, and how many rows come of each rank."""
    check_started("alltoall")
    mine: list[int] = []
    fault = fault_of(lambda: mine.extend(_split_of(tensor, splits)))
    facts = agreed(fault, None if fault else (str(tensor.dtype), tuple(tensor.shape), mine))
    check_rows("alltoall", [(dtype, shape) for dtype, shape, _ in facts])
    received = [of_rank[dist.get_rank()] for _, _, of_rank in facts]
    out = tensor.new_empty(sum(received), *tensor.shape[1:])
    result = out if splits is None else (out, torch.tensor(received, dtype=torch.int32))
    if not any(torch.Size(shape).numel() for _, shape, _ in facts):
        return Handle([], lambda: result), received
    work = dist.all_to_all_single(out, tensor.detach().resolve_conj().contiguous(), received, mine, async_op=True)
    return Handle([work], lambda: result), received


def alltoall(
    tensor: torch.Tensor, splits: torch.Tensor | Sequence[int] | None = None, name: str | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The rows that all ranks have for this one, by rank; with `splits` also how many came of each, int32 [ranks].

    `splits[r]` rows of `tensor` go to rank r, an equal number of them without `splits`. Raises ValueError on all ranks
    where splits are not those of the tensor, dtypes or dims other than 0 differ, and before `init`; TypeError on all
    ranks for what is no dense tensor. Its gradient goes back where the rows came from; all ranks join.
    """
    received: list[int] = []

    def exchange(tensor: torch.Tensor) -> Any:
        handle, of_ranks = _start_alltoall(tensor, splits)
        received.extend(of_ranks)
        return synchronize(handle)

    def derivative(grad: torch.Tensor, *_: Any) -> list[torch.Tensor]:
        return [alltoall(grad, received)[0]]

    return differentiable(exchange, derivative, tensor)


def _pickled(caller: str, value: Any) -> tuple[bytes, str]:
    """The object as bytes, or why it cannot be."""
    try:
        return pickle.dumps(value), ""
    except Exception as error:  # of the object's author, whatever it is
        return b"", (
            f"{caller} takes what can be pickled, but its {type(value).__name__} of rank {dist.get_rank()} cannot: "
            f"{type(error).__name__}: {error}"
        )


def _loaded(caller: str, parts: Sequence[bytes]) -> list[Any]:
    """The objects that these bytes are; collective: TypeError on all ranks if one of them cannot load one."""
    fault: TypeError | None = None
    objects: list[Any] = []
    try:
        objects = [pickle.loads(data) for data in parts]
    except Exception as error:  # of the object's author, whatever it is
        fault = TypeError(f"{caller}: what was sent cannot be loaded: {type(error).__name__}: {error}")
    agreed(fault)
    return objects


def broadcast_object(obj: Any = None, root_rank: int = 0, name: str | None = None) -> Any:
    """The object of `root_rank`; ValueError for a root that is no rank.

    TypeError on all ranks if it does not pickle, or does not load on one of them.
    """
    check_started("broadcast_object")
    checked(lambda: check_root("broadcast_object", root_rank))
    box = [_pickled("broadcast_object", obj) if dist.get_rank() == root_rank else (b"", "")]
    dist.broadcast_object_list(box, root_rank)
    data, fault = box[0]
    if fault:
        raise TypeError(fault)
    loaded = _loaded("broadcast_object", [] if dist.get_rank() == root_rank else [data])
    return loaded[0] if loaded else obj


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """The objects of all ranks, by rank; TypeError on all ranks if one does not pickle or load."""
    check_started("allgather_object")
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, _pickled("allgather_object", obj))
    for _, fault in gathered:
        if fault:
            raise TypeError(fault)
    return _loaded("allgather_object", [data for data, _ in gathered])
