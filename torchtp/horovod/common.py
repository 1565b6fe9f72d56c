"""What every part of Horovod's face is made of: handles, checks, and faults that all ranks raise alike."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


class Compression:
    """What floating-point tensors of more than 16 bits travel as."""

    none, fp16, bf16 = "none", "fp16", "bf16"


@dataclass
class Handle:
    """An operation under way; `synchronize` gives its result."""

    works: list[dist.Work]
    finish: Callable[[], Any]


def synchronize(handle: Handle) -> Any:
    """Wait for an asynchronous operation and return its result; TypeError for what is no Handle."""
    _check_handle("synchronize", handle)
    if handle.works:
        for work in handle.works:
            work.wait()
        handle.works = []
        result = handle.finish()
        handle.finish = lambda: result
    return handle.finish()


def poll(handle: Handle) -> bool:
    """Whether `synchronize` would return at once; TypeError for what is no Handle."""
    _check_handle("poll", handle)
    return all(work.is_completed() for work in handle.works)


def _check_handle(caller: str, handle: Any) -> None:
    if not isinstance(handle, Handle):
        raise TypeError(
            f"{caller} takes what allreduce_async or another of the asynchronous calls has returned, but it is a "
            f"{type(handle).__name__}"
        )


def grouped(handles: Sequence[Handle]) -> Handle:
    """One handle for several operations; its result is the list of theirs."""
    works = [work for handle in handles for work in handle.works]
    return Handle(works, lambda: [handle.finish() for handle in handles])


def checked(check: Callable[[], T]) -> T:
    """What a check gives. If it raises, so do the ranks that make the call: this one refuses it in its place.

    On the backend torchtp; elsewhere they wait until their timeout. Where all ranks are refused the group goes on.
    """
    try:
        return check()
    except (TypeError, ValueError):
        # A call that no backend takes: torchtp tells the other ranks, gloo sends nothing.
        with contextlib.suppress(RuntimeError):
            dist.all_reduce(torch.ones(1, dtype=torch.bool), dist.ReduceOp.AVG)
        raise


def check_started(caller: str) -> None:
    """Raise ValueError where there is no process group yet."""
    if not dist.is_initialized():
        raise ValueError(f"{caller}: this process has not joined the others yet: call hvd.init() first")


def check_tensor(caller: str, tensor: Any) -> None:
    """Raise TypeError for what is no dense tensor."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(
            f"{caller} takes a torch.Tensor, but it is a {type(tensor).__name__}: make it one by torch.as_tensor, or "
            "pass objects by broadcast_object or allgather_object"
        )
    if tensor.is_meta:
        raise TypeError(f"{caller} takes a tensor that has data, but it is on the device meta")
    if tensor.layout != torch.strided:
        raise TypeError(f"{caller} takes a dense tensor, but its layout is {tensor.layout}: pass tensor.to_dense()")


def check_root(caller: str, root_rank: int) -> None:
    """Raise ValueError for a root that is no rank, TypeError for what is no number."""
    if not isinstance(root_rank, int):
        raise TypeError(f"{caller}: root_rank is a rank, but it is a {type(root_rank).__name__}, {root_rank!r}")
    if not 0 <= root_rank < dist.get_world_size():
        raise ValueError(f"{caller}: root_rank is one of 0 to {dist.get_world_size() - 1}, but it is {root_rank}")


def check_rows(caller: str, facts: Sequence[tuple[str, tuple[int, ...]]]) -> None:
    """Raise ValueError, on all ranks alike, where (dtype, shape) of ranks differ in more than dim 0."""
    for rank, (dtype, shape) in enumerate(facts):
        if (dtype, shape[1:]) != (facts[0][0], facts[0][1][1:]):
            raise ValueError(
                f"{caller}: tensors of all ranks have one dtype and are of one shape but for dim 0, but rank 0's is "
                f"{facts[0][0]} of shape {facts[0][1]} where rank {rank}'s is {dtype} of shape {shape}: reshape or pad them"
            )
