"""Sums, means, extremes and products over all ranks: `allreduce` and `reducescatter` in all their forms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist

from torchtp.horovod.common import Compression, Handle, check_started, check_tensor, checked, grouped, synchronize

Sum, Average, Min, Max, Product = "sum", "average", "min", "max", "product"
_REDUCE_OPS = {Sum: dist.ReduceOp.SUM, Average: dist.ReduceOp.SUM, Min: dist.ReduceOp.MIN, Max: dist.ReduceOp.MAX}
_REDUCE_OPS[Product] = dist.ReduceOp.PRODUCT
_COMPRESSIONS = {Compression.none: None, Compression.fp16: torch.float16, Compression.bf16: torch.bfloat16}


class _Reduction:
    """How one tensor is reduced: what is done to it before it travels, and to what has come."""

    def __init__(
        self,
        caller: str,
        tensor: torch.Tensor,
        average: bool | None,
        op: str | None,
        compression: str,
        prescale_factor: float,
        postscale_factor: float,
    ):
        check_tensor(caller, tensor)
        if average is not None and not isinstance(average, bool):
            raise TypeError(
                f"{caller}: average is True, False or None, but it is {average!r}: give name= and op= by their names"
            )
        if average is not None and op is not None:
            raise ValueError(f"{caller}: give op or average, not both, but they are {op!r} and {average}")
        op = op if op is not None else Average if average is not False else Sum
        for name, factor in (("prescale_factor", prescale_factor), ("postscale_factor", postscale_factor)):
            if not isinstance(factor, (Real, torch.Tensor)):
                raise TypeError(f"{caller}: {name} is a number, but it is {factor!r}")
        if op not in _REDUCE_OPS:
            raise ValueError(f"{caller}: op is one of {', '.join(_REDUCE_OPS)}, but it is {op!r}")
        if compression not in _COMPRESSIONS:
            raise ValueError(f"{caller}: compression is one of {', '.join(_COMPRESSIONS)}, but it is {compression!r}")
        is_scaled = not prescale_factor == postscale_factor == 1.0
        if tensor.dtype == torch.bool and (op == Average or is_scaled):
            raise ValueError(
                f"{caller}: a torch.bool tensor has no mean and cannot be scaled: pass tensor.float() for the share of "
                "ranks where it is set, or op=hvd.Max for whether it is anywhere"
            )
        wide = tensor.is_floating_point() and tensor.element_size() > 2
        fractions = tensor.is_floating_point() or tensor.is_complex()
        self._prescale, self._postscale = prescale_factor, postscale_factor
        self._travels_as = (_COMPRESSIONS[compression] if wide else None) or tensor.dtype
        # Divided before it is rounded: what is compressed must not overflow where the mean would not.
        means = op == Average and fractions and self._travels_as == tensor.dtype and _knows_means(tensor)
        self.op = dist.ReduceOp.AVG if means else _REDUCE_OPS[op]
        self._before, self._after = op == Average and fractions and not means, op == Average and not fractions

    @torch.no_grad()
    def message(self, tensor: torch.Tensor) -> torch.Tensor:
        """What travels, contiguous; the tensor itself where nothing is to be done."""
        message = _scaled(tensor, self._prescale)
        if self._before:
            message = message / dist.get_world_size()
        return message.to(self._travels_as).contiguous()

    @torch.no_grad()
    def result(self, message: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """What is made of the reduced message."""
        if self._after:
            message = message.div_(dist.get_world_size(), rounding_mode="floor")
        return _scaled(message.to(dtype), self._postscale)


def _knows_means(tensor: torch.Tensor) -> bool:
    world = dist.distributed_c10d._get_default_group()
    # Its name: what stands behind a wrapper of DETAIL debug mode has no other.
    return world._get_backend(tensor.device).name() == "torchtp"


def _checked(caller: str, *how: Any) -> _Reduction:
    check_started(caller)
    return checked(lambda: _Reduction(caller, *how))


def _scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    if factor == 1.0:
        return tensor
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor * factor
    return (tensor.double() * factor).to(tensor.dtype)


@torch.no_grad()
def _reduce_in_place(tensor: torch.Tensor, reduction: _Reduction) -> Handle:
    message = reduction.message(tensor)
    work = dist.all_reduce(message, reduction.op, async_op=True)

    def finish() -> torch.Tensor:
        result = reduction.result(message, tensor.dtype)
        if result is not tensor:
            tensor.detach().copy_(result)
        return tensor

    return Handle([work], finish)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: str = Compression.none,
) -> Handle:
    """Start to reduce `tensor` in place over all ranks; `op` is Average (the default), Sum, Min, Max or Product.

    `average`, Horovod's older way to say it, is True for Average and False for Sum. Factors multiply what goes in and
    what comes out; integers are scaled in fp64 and cut off. Calls meet in their order: names are not looked at.

    Raises TypeError for what is no dense tensor and a factor that is no number, ValueError for both `op` and `average`,
    an op or compression that is none, the mean of a torch.bool, and before `init`.
    """
    how = _checked("allreduce", tensor, average, op, compression, prescale_factor, postscale_factor)
    return _reduce_in_place(tensor, how)


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: str = Compression.none,
) -> Handle:
    """Like `allreduce_async_`, into a new tensor."""
    how = _checked("allreduce", tensor, average, op, compression, prescale_factor, postscale_factor)
    return _reduce_in_place(tensor.detach().clone(), how)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: str = Compression.none,
) -> torch.Tensor:
    """Reduce `tensor` in place over all ranks and return it; see `allreduce_async_`."""
    return synchronize(allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, compression))


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: str = Compression.none,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """The reduction of `tensor` over all ranks, in a new tensor; see `allreduce_async_`."""
    return synchronize(allreduce_async(tensor, average, name, op, prescale_factor, postscale_factor, compression))


def _grouped_allreduce(
    start: Callable[[torch.Tensor, _Reduction], Handle],
    tensors: Sequence[torch.Tensor],
    average: bool | None,
    op: str | None,
    prescale_factor: float,
    postscale_factor: float,
    compression: str,
) -> Handle:
    rest = (average, op, compression, prescale_factor, postscale_factor)

    def check() -> list[_Reduction]:
        if isinstance(tensors, torch.Tensor) or not isinstance(tensors, Sequence):
            raise TypeError(f"grouped_allreduce takes a list of tensors, but it is a {type(tensors).__name__}")
        return [_Reduction("grouped_allreduce", tensor, *rest) for tensor in tensors]

    check_started("grouped_allreduce")
    hows = checked(check)  # all before one leaves
    return grouped([start(tensor, how) for tensor, how in zip(tensors, hows, strict=True)])


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: str = Compression.none,
) -> Handle:
    """Start to reduce several tensors in place; their list is the result. See `allreduce_async_`."""
    rest = (average, op, prescale_factor, postscale_factor, compression)
    return _grouped_allreduce(_reduce_in_place, tensors, *rest)


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: str = Compression.none,
) -> Handle:
    """Like `grouped_allreduce_async_`, into new tensors."""
    rest = (average, op, prescale_factor, postscale_factor, compression)
    return _grouped_allreduce(lambda one, how: _reduce_in_place(one.detach().clone(), how), tensors, *rest)


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: str = Compression.none,
) -> list[torch.Tensor]:
    """Reduce several tensors in place and return them; see `allreduce_async_`."""
    return synchronize(
        grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, compression)
    )


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: str = Compression.none,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """The reductions of several tensors, in new ones; see `allreduce_async_`."""
    return synchronize(
        grouped_allreduce_async(tensors, average, name, op, prescale_factor, postscale_factor, compression)
    )


@torch.no_grad()
def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: str = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: str = Compression.none,
) -> Handle:
    """Start to reduce tensors [N, ...] of all ranks and give each its rows: N // size, one more on the first N % size ranks.

    Raises what `allreduce_async_` does, and ValueError for a tensor of no dims.
    """

    def check() -> _Reduction:
        how = _Reduction("reducescatter", tensor, None, op, compression, prescale_factor, postscale_factor)
        if not tensor.dim():
            raise ValueError("reducescatter: a tensor of no dims has no dim 0 to cut: give tensor.reshape(1)")
        return how

    check_started("reducescatter")
    how = checked(check)
    rank, size = dist.get_rank(), dist.get_world_size()
    each, more = divmod(tensor.size(0), size)
    message = how.message(tensor)
    longest = each + (more > 0)
    if more:
        padded = message.new_zeros(size, longest, *tensor.shape[1:])
        for row, part in zip(padded, message.tensor_split(size), strict=True):
            row[: part.size(0)] = part
        message = padded.flatten(0, 1)
    mine = message.new_empty(longest, *tensor.shape[1:])
    work = dist.reduce_scatter_tensor(mine, message, how.op, async_op=True)
    return Handle([work], lambda: how.result(mine[: each + (rank < more)], tensor.dtype))


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: str = Compression.none,
    op: str = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """This rank's rows of the reduction of [N, ...] over all ranks; see `reducescatter_async`."""
    return synchronize(reducescatter_async(tensor, name, op, prescale_factor, postscale_factor, compression))
