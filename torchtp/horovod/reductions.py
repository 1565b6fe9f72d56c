"""Sums, means, extremes and products over all ranks: `allreduce` in all its forms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist

from torchtp.horovod.common import Compression, Handle, check_started, check_tensor, checked, grouped, synchronize
from torchtp.horovod.derivatives import differentiable

Sum, Average, Min, Max, Product = "sum", "average", "min", "max", "product"
_REDUCE_OPS = {Sum: dist.ReduceOp.SUM, Average: dist.ReduceOp.SUM, Min: dist.ReduceOp.MIN, Max: dist.ReduceOp.MAX}
_REDUCE_OPS[Product] = dist.ReduceOp.PRODUCT
_COMPRESSIONS = {Compression.none: None, Compression.fp16: torch.float16, Compression.bf16: torch.bfloat16}


class Reduction:
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
        op = _op_of(op, average)
        for name, factor in (("prescale_factor", prescale_factor), ("postscale_factor", postscale_factor)):
            is_one = factor.numel() == 1 if isinstance(factor, torch.Tensor) else isinstance(factor, Real)
            if not is_one:
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


def _op_of(op: str | None, average: bool | None) -> str:
    return op if op is not None else Average if average is not False else Sum


def check_gradient(caller: str, op: str) -> None:
    """Raise RuntimeError where backward comes through what has no gradient."""
    if op not in (Average, Sum):
        raise RuntimeError(
            f"{caller}: op {op} has no gradient: take Average or Sum, or give tensor.detach() where none is wanted"
        )


def _knows_means(tensor: torch.Tensor) -> bool:
    world = dist.distributed_c10d._get_default_group()
    # Its name: what stands behind a wrapper of DETAIL debug mode has no other.
    return world._get_backend(tensor.device).name() == "torchtp"


def _checked(caller: str, *how: Any) -> Reduction:
    check_started(caller)
    return checked(lambda: Reduction(caller, *how))


def _scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    if factor == 1.0:
        return tensor
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor * factor
    return (tensor.double() * factor).to(tensor.dtype)


@torch.no_grad()
def _reduce_in_place(tensor: torch.Tensor, reduction: Reduction) -> Handle:
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
    """The reduction of `tensor` over all ranks, in a new tensor; see `allreduce_async_`.

    Its gradient is reduced in the same way, which all ranks join; RuntimeError in backward for Min, Max and Product.
    """
    rest = (op, prescale_factor, postscale_factor)

    def reduce(tensor: torch.Tensor) -> torch.Tensor:
        return synchronize(allreduce_async(tensor, average, name, *rest, compression))

    def derivative(grad: torch.Tensor) -> list[torch.Tensor]:
        check_gradient("allreduce", _op_of(op, average))
        return [allreduce(grad, average, name, compression, *rest)]

    return differentiable(reduce, derivative, tensor)


def _is_list(tensors: Any) -> bool:
    return isinstance(tensors, Sequence) and not isinstance(tensors, torch.Tensor)


def _grouped_allreduce(
    start: Callable[[torch.Tensor, Reduction], Handle],
    tensors: Sequence[torch.Tensor],
    average: bool | None,
    op: str | None,
    prescale_factor: float,
    postscale_factor: float,
    compression: str,
) -> Handle:
    rest = (average, op, compression, prescale_factor, postscale_factor)

    def check() -> list[Reduction]:
        if not _is_list(tensors):
            raise TypeError(f"grouped_allreduce takes a list of tensors, but it is a {type(tensors).__name__}")
        return [Reduction("grouped_allreduce", tensor, *rest) for tensor in tensors]

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
    """The reductions of several tensors, in new ones, and their gradients; see `allreduce`."""
    rest = (op, prescale_factor, postscale_factor)
    is_list = _is_list(tensors)  # what is none is refused where the others hear of it

    def reduce(*each: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = each if is_list else tensors
        return tuple(synchronize(grouped_allreduce_async(given, average, name, *rest, compression)))

    def derivative(*grads: torch.Tensor) -> list[torch.Tensor]:
        check_gradient("grouped_allreduce", _op_of(op, average))
        return grouped_allreduce(grads, average, name, compression, *rest)

    return list(differentiable(reduce, derivative, *(tensors if is_list else ())))
