"""Average and adaptive average pooling of cut DTensors, and what all pools share."""

from __future__ import annotations

from typing import Any

import torch

from torchtp.dtensor.agreed import check_fractions
from torchtp.dtensor.cut import Placements, cut_of, is_cut, owned
from torchtp.dtensor.moving import all_reduced
from torchtp.dtensor.own_images import takes_images_cut_twice
from torchtp.dtensor.registry import bound, composite_rule, rule
from torchtp.dtensor.rules.fallback import unruled
from torchtp.dtensor.sharing import local_as
from torchtp.dtensor.spatial import arrange, mark
from torchtp.dtensor.upstream import DeviceMesh, DTensor, Op, Replicate, plain_shard
from torchtp.dtensor.wrapping import wrap, wrap_in_format

ops = torch.ops.torchtp


def any_dim(_dim: int) -> bool:
    """Any may be cut."""
    return True


def each(values: Any, num_dims: int) -> list[int]:
    """A parameter of a pool, one number for each dim."""
    values = list(values) if not isinstance(values, int) else [values]
    return values * num_dims if len(values) == 1 else values


def pooled_shape(
    shape: torch.Size, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int], ceil: bool
) -> torch.Size:
    """Global shape of a pool's output."""
    out = list(shape[: -len(kernel)])
    for i, extent in enumerate(shape[-len(kernel) :]):
        free = extent + 2 * padding[i] - dilation[i] * (kernel[i] - 1) - 1
        size = (-(-free // stride[i]) if ceil else free // stride[i]) + 1
        if ceil and (size - 1) * stride[i] >= extent + padding[i]:
            size -= 1  # a window that begins in the padding behind
        out.append(size)
    return torch.Size(out)


def _avg_pool_params(num_dims: int, params: Any) -> tuple[Any, ...]:
    kernel, stride, padding, *others = params
    kernel = each(kernel, num_dims)
    return kernel, each(stride, num_dims) if stride else kernel, each(padding, num_dims), *others


@rule("avg_pool2d", "avg_pool3d")
@takes_images_cut_twice
def avg_pool(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    input, *params = bound(op, args, kwargs)
    num_dims = int(op._schema.name[-2])
    if not is_cut(input) or input.dim() != num_dims + 2:
        return unruled(op, args, kwargs)
    local, mesh, placements = arrange(op, input, any_dim)
    cut = cut_of(mesh, placements, input.shape)
    assert cut is not None
    mark(mesh, cut.axes)
    pool = _avg_pool_params(num_dims, params)
    output = ops.avg_pool(local, *pool, cut.dims, cut.extents, cut.groups)
    kernel, stride, padding, ceil = pool[:4]
    return wrap(output, mesh, placements, pooled_shape(input.shape, kernel, stride, padding, [1] * num_dims, ceil))


@rule("avg_pool2d_backward", "avg_pool3d_backward")
@takes_images_cut_twice
def avg_pool_backward(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grad_output, input, *params = bound(op, args, kwargs)
    num_dims = 2 if "2d" in op._schema.name else 3
    if not is_cut(input) or input.dim() != num_dims + 2:
        return unruled(op, args, kwargs)
    local, mesh, placements = arrange(op, input, any_dim)
    cut = cut_of(mesh, placements, input.shape)
    assert cut is not None
    pool = _avg_pool_params(num_dims, params)
    grad_input = ops.avg_pool_backward(
        local_as(grad_output, mesh, placements), local.shape, *pool, cut.dims, cut.extents, cut.groups
    )
    return wrap(grad_input, mesh, placements, input.shape)


def _bins(extent: int, size: int, begin: int, end: int, like: torch.Tensor) -> torch.Tensor:
    """[size, end - begin]: the share of rows [begin, end) of `extent` in the averages over `size` bins."""
    rows = torch.arange(begin, end)
    bins = torch.arange(size).unsqueeze(1)
    first, last = bins * extent // size, -((bins + 1) * -extent // size)
    return (((rows >= first) & (rows < last)).double() / (last - first)).to(like)


def _averaging(
    input: DTensor, local: torch.Tensor, sizes: list[int], mesh: DeviceMesh, placements: Placements
) -> list[torch.Tensor]:
    """For each pooled dim the matrix that averages this rank's rows into the bins."""
    matrices = []
    for i, size in enumerate(sizes):
        dim = input.dim() - len(sizes) + i
        begin, end = 0, input.size(dim)
        for axis, placement in enumerate(placements):
            if plain_shard(placement) and placement.dim == dim:
                begin, end = owned(end, mesh.size(axis), mesh.get_local_rank(axis))
        matrices.append(_bins(input.size(dim), size, begin, end, local))
    return matrices


def _along(matrices: list[torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """Each of the last dims multiplied by its matrix."""
    for i, matrix in enumerate(matrices):
        dim = tensor.dim() - len(matrices) + i
        product = torch.tensordot(tensor, matrix, dims=([dim], [1])).movedim(-1, dim)
        # Infinite numbers make NaN of what has no share in them. Other devices would have to be waited for.
        if product.is_cpu and not product.isfinite().all():
            product = torch.stack([_weighed(tensor, dim, shares) for shares in matrix], dim)
        tensor = product
    return tensor


def _weighed(tensor: torch.Tensor, dim: int, shares: torch.Tensor) -> torch.Tensor:
    """The sum of the rows that have a share."""
    rows = shares.nonzero()[:, 0]
    weights = shares[rows].view([-1] + [1] * (tensor.dim() - 1 - dim))
    return (tensor.index_select(dim, rows) * weights).sum(dim)


@rule("_adaptive_avg_pool2d", "_adaptive_avg_pool3d")
@takes_images_cut_twice
def adaptive_avg_pool(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Bins straddle ranks: every rank averages its part of each bin, the parts are summed; the output is whole."""
    input, sizes = bound(op, args, kwargs)
    if not is_cut(input) or input.dim() != len(sizes) + 2:
        return unruled(op, args, kwargs)
    check_fractions(op, input)
    local, mesh, placements = arrange(op, input, any_dim)
    cut = cut_of(mesh, placements, input.shape)
    assert cut is not None
    mark(mesh, cut.axes)
    wide = local.float() if local.dtype.itemsize == 2 else local
    averages = _along(_averaging(input, wide, list(sizes), mesh, placements), wide).contiguous()
    averages = all_reduced(averages, mesh, cut.axes).to(local.dtype)
    kept = tuple(Replicate() if axis in cut.axes else p for axis, p in enumerate(placements))
    shape = torch.Size([*input.shape[: -len(sizes)], *sizes])
    return wrap_in_format(averages, mesh, kept, shape, input if input.dim() == 4 else None)


@rule("_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward")
@takes_images_cut_twice
def adaptive_avg_pool_backward(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grad_output, input = bound(op, args, kwargs)
    if not is_cut(input) or input.dim() != (4 if "2d" in op._schema.name else 5):
        return unruled(op, args, kwargs)
    local, mesh, placements = arrange(op, input, any_dim)
    sizes = list(grad_output.shape[2:])
    kept = tuple(Replicate() if plain_shard(p) and p.dim >= 2 else p for p in placements)
    matrices = _averaging(input, local, sizes, mesh, placements)
    grad_input = _along([matrix.t() for matrix in matrices], local_as(grad_output, mesh, kept))
    return wrap(grad_input.contiguous(), mesh, placements, input.shape)


@composite_rule("adaptive_avg_pool2d")
def adaptive_avg_pool2d(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As aten takes it apart, but for restriding the mean of a channels_last tensor, which has no derivative here."""
    input, sizes = args
    if all(size == 1 for size in sizes):
        return input.mean((-2, -1), keepdim=True)
    return torch.ops.aten._adaptive_avg_pool2d(input, sizes)
