"""Horovod's face for PyTorch over torch.distributed: `import torchtp.horovod as hvd` in a script written for Horovod.

What is not the same: gradients are global as soon as `backward()` returns, results of collectives carry no graph, and
there is no Adasum and no elastic mode (torchrun restarts jobs).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from torchtp import gradients

Sum, Average, Min, Max, Product = "sum", "average", "min", "max", "product"
_REDUCE_OPS = {Sum: dist.ReduceOp.SUM, Average: dist.ReduceOp.SUM, Min: dist.ReduceOp.MIN, Max: dist.ReduceOp.MAX}
_REDUCE_OPS[Product] = dist.ReduceOp.PRODUCT

Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)


class Compression:
    """What floating-point tensors of more than 16 bits travel as."""

    none, fp16, bf16 = "none", "fp16", "bf16"


_COMPRESSIONS = {Compression.none: None, Compression.fp16: torch.float16, Compression.bf16: torch.bfloat16}


def init(backend: str = "torchtp") -> None:
    """Join the ranks that torchrun started, alone without it; does nothing where a process group exists."""
    if dist.is_initialized():
        return
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())


def shutdown() -> None:
    """Leave the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()


def is_initialized() -> bool:
    return dist.is_initialized()


def size() -> int:
    return dist.get_world_size()


def rank() -> int:
    return dist.get_rank()


def local_rank() -> int:
    """The rank among those of this host, as torchrun numbers them."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_size() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def cross_rank() -> int:
    """The number of this host, as torchrun numbers them."""
    return int(os.environ.get("GROUP_RANK", "0"))


@dataclass
class Handle:
    """An operation under way; `synchronize` gives its result."""

    work: dist.Work | None
    finish: Callable[[], Any]


def synchronize(handle: Handle) -> Any:
    """Wait for an asynchronous operation and return its result."""
    if handle.work is not None:
        handle.work.wait()
        handle.work = None
        result = handle.finish()
        handle.finish = lambda: result
    return handle.finish()


def poll(handle: Handle) -> bool:
    """Whether `synchronize` would return at once."""
    return handle.work is None or handle.work.is_completed()


@torch.no_grad()
def allreduce_async_(
    tensor: torch.Tensor, name: str | None = None, op: str = Average, compression: str = Compression.none
) -> Handle:
    """Start to reduce `tensor` in place over all ranks; `op` is Average, Sum, Min, Max or Product."""
    if compression not in _COMPRESSIONS:
        raise ValueError(f"compression is one of {', '.join(_COMPRESSIONS)}, but it is {compression!r}")
    if op not in _REDUCE_OPS:
        raise ValueError(f"op is one of {', '.join(_REDUCE_OPS)}, but it is {op!r}")
    wide = tensor.is_floating_point() and tensor.element_size() > 2
    dtype = _COMPRESSIONS[compression] if wide else None
    fractions = tensor.is_floating_point() or tensor.is_complex()
    # Divided before it is rounded: a sum of fp16 must not overflow where the mean would not.
    message = tensor / size() if op == Average and fractions else tensor.contiguous()
    message = message.to(dtype).contiguous() if dtype else message.contiguous()
    work = dist.all_reduce(message, _REDUCE_OPS[op], async_op=True)

    def finish() -> torch.Tensor:
        if op == Average and not fractions:
            message.div_(size(), rounding_mode="floor")
        if message is not tensor:
            tensor.detach().copy_(message)
        return tensor

    return Handle(work, finish)


def allreduce_async(
    tensor: torch.Tensor, name: str | None = None, op: str = Average, compression: str = Compression.none
) -> Handle:
    """Like `allreduce_async_`, into a new tensor."""
    return allreduce_async_(tensor.detach().clone(), name, op, compression)


def allreduce_(
    tensor: torch.Tensor, name: str | None = None, op: str = Average, compression: str = Compression.none
) -> torch.Tensor:
    """Reduce `tensor` in place over all ranks and return it."""
    return synchronize(allreduce_async_(tensor, name, op, compression))


def allreduce(
    tensor: torch.Tensor, name: str | None = None, op: str = Average, compression: str = Compression.none
) -> torch.Tensor:
    """The reduction of `tensor` over all ranks, in a new tensor."""
    return synchronize(allreduce_async(tensor, name, op, compression))


@torch.no_grad()
def allgather(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """Concatenation of all ranks' tensors along dim 0, in which they may differ."""
    if not tensor.dim():
        raise ValueError("allgather: a tensor of no dims has no dim 0 to concatenate along: give tensor.reshape(1)")
    lengths = [torch.zeros(1, dtype=torch.int64, device=tensor.device) for _ in range(size())]
    dist.all_gather(lengths, torch.tensor([tensor.size(0)], device=tensor.device))
    longest = max(int(length) for length in lengths)
    padded = tensor.new_zeros(longest, *tensor.shape[1:])
    padded[: tensor.size(0)] = tensor
    gathered = [torch.empty_like(padded) for _ in range(size())]
    dist.all_gather(gathered, padded)
    return torch.cat([part[: int(length)] for part, length in zip(gathered, lengths, strict=True)])


def broadcast_async_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> Handle:
    """Start to overwrite `tensor` by that of `root_rank`."""
    message = tensor.detach().contiguous()
    work = dist.broadcast(message, root_rank, async_op=True)

    def finish() -> torch.Tensor:
        if message.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(message)
        return tensor

    return Handle(work, finish)


def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Overwrite `tensor` by that of `root_rank` and return it."""
    return synchronize(broadcast_async_(tensor, root_rank, name))


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """The tensor of `root_rank`, in a new one."""
    return broadcast_(tensor.detach().clone(), root_rank, name)


def broadcast_object(value: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """The picklable object of `root_rank`."""
    box = [value]
    dist.broadcast_object_list(box, root_rank)
    return box[0]


def barrier() -> None:
    dist.barrier()


def broadcast_parameters(params: Any, root_rank: int = 0) -> None:
    """Overwrite a state_dict's or named tensors by those of `root_rank`."""
    gradients.broadcast_parameters(params, root=root_rank)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int = 0) -> None:
    """Overwrite an optimizer's state and hyperparameters by those of `root_rank`."""
    gradients.broadcast_optimizer_state(optimizer, root=root_rank)


class _Distributed:
    """Mixed into the class of an optimizer that `DistributedOptimizer` was called on."""

    _reducer: gradients.GradientReducer

    def synchronize(self) -> None:
        """Reduce gradients that were accumulated since the last reduction, if there are any."""
        if self._reducer.num_unreduced:
            self._reducer.reduce()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """For scripts that call `synchronize` before `step`: nothing is done twice anyway."""
        yield

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        if closure is None:
            self.synchronize()
        return super().step(closure)  # type: ignore[misc]


def DistributedOptimizer(
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: str = Compression.none,
    backward_passes_per_step: int = 1,
    op: str = Average,
) -> Optimizer:
    """Make gradients of the optimizer's parameters global in every `backward_passes_per_step`-th backward; the optimizer is changed in place and returned.

    Raises ValueError on every rank if the ranks' parameters differ, and for an `op` that is not Average or Sum.
    """
    if op not in (Average, Sum):
        raise ValueError(f"DistributedOptimizer: op is Average or Sum, but it is {op!r}")
    if isinstance(optimizer, _Distributed):
        raise ValueError("DistributedOptimizer: this optimizer is distributed already")
    if named_parameters is None:
        every = [p for group in optimizer.param_groups for p in group["params"]]
        named_parameters = [(f"parameter {index}", p) for index, p in enumerate(every)]
    reducer = gradients.GradientReducer(named_parameters, compression=compression, average=op == Average)
    reducer.reduce_every(backward_passes_per_step)
    base = type(optimizer)
    optimizer.__class__ = type(base.__name__, (_Distributed, base), {})
    optimizer._reducer = reducer  # type: ignore[attr-defined]
    return optimizer
