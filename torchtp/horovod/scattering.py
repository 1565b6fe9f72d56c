"""Reductions of which each rank gets its rows: `reducescatter` in its forms."""

from __future__ import annotations

import torch
import torch.distributed as dist

from torchtp.horovod.common import Compression, Handle, check_started, checked, synchronize
from torchtp.horovod.derivatives import differentiable
from torchtp.horovod.moves import allgather
from torchtp.horovod.reductions import Average, Reduction, Sum, check_gradient


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

    def check() -> Reduction:
        how = Reduction("reducescatter", tensor, None, op, compression, prescale_factor, postscale_factor)
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
    """This rank's rows of the reduction of [N, ...] over all ranks; see `reducescatter_async`.

    Its gradient is, as Horovod's, all ranks' gradients one below the other, times the factors; with op Sum times their
    number, too. RuntimeError in backward for Min, Max and Product.
    """

    def reduce(tensor: torch.Tensor) -> torch.Tensor:
        return synchronize(reducescatter_async(tensor, name, op, prescale_factor, postscale_factor, compression))

    def derivative(grad: torch.Tensor) -> list[torch.Tensor]:
        check_gradient("reducescatter", op)
        factor = prescale_factor * postscale_factor * (dist.get_world_size() if op == Sum else 1)
        return [allgather(grad * factor)]

    return differentiable(reduce, derivative, tensor)
