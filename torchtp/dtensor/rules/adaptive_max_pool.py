"""Adaptive max pooling of cut DTensors: every rank's maxima of its part of each bin, the largest of them on all ranks."""

from __future__ import annotations

import math
from typing import Any

import torch

from torchtp.dtensor.cut import Placements, cut_of, is_cut
from torchtp.dtensor.moving import chunk_of, everywhere
from torchtp.dtensor.registry import bound, rule
from torchtp.dtensor.rules.fallback import unruled
from torchtp.dtensor.rules.pooling import any_dim
from torchtp.dtensor.rules.shape import axis_cutting
from torchtp.dtensor.sharing import local_as
from torchtp.dtensor.spatial import arrange, mark
from torchtp.dtensor.upstream import DeviceMesh, Op, Replicate
from torchtp.dtensor.wrapping import wrap, wrap_in_format

_NOWHERE = torch.iinfo(torch.int64).max // 2  # plus an index it is still none


def _owned(shape: torch.Size, dim: int, mesh: DeviceMesh, placements: Placements) -> tuple[int, int]:
    """The rows of a dim that this rank has."""
    axis = axis_cutting(placements, dim)
    return (0, shape[dim]) if axis is None else chunk_of(mesh, axis, shape[dim])


def _rows_of_bins(extent: int, size: int, begin: int, end: int) -> tuple[list[list[int]], list[bool]]:
    """For each of `size` bins over `extent` the rows it has of [begin, end), as many for all, and whether it has none.

    Where a bin has fewer its last one is repeated.
    """
    bins = [(i * extent // size, -((i + 1) * -extent // size)) for i in range(size)]
    own = [range(max(first, begin), min(last, end)) for first, last in bins]
    longest = max(1, max(len(rows) for rows in own))
    filled = [[*rows, *[rows[-1]] * (longest - len(rows))] if rows else [begin] * longest for rows in own]
    return filled, [not rows for rows in own]


def _largest_of_own(
    local: torch.Tensor, shape: torch.Size, sizes: list[int], mesh: DeviceMesh, placements: Placements
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and flat global places of the maxima of this rank's part of each bin; of equal ones the first."""
    first = len(shape) - len(sizes)
    if local.numel() == 0:
        empty = [*local.shape[:first], *sizes]
        return local.new_full(empty, -math.inf), local.new_full(empty, _NOWHERE, dtype=torch.int64)
    values, places = local, torch.zeros((), dtype=torch.int64, device=local.device).expand(local.shape)
    for dim in range(len(shape) - 1, first - 1, -1):
        begin, end = _owned(shape, dim, mesh, placements)
        size = sizes[dim - first]
        rows, without = _rows_of_bins(shape[dim], size, begin, end)
        row = torch.tensor(rows, device=local.device)
        split = [*values.shape[:dim], *row.shape, *values.shape[dim + 1 :]]
        beside = [-1, *[1] * (len(shape) - 1 - dim)]
        values, chosen = values.index_select(dim, row.flatten() - begin).view(split).max(dim + 1)
        coordinate = (row * math.prod(shape[dim + 1 :])).view(*row.shape, *beside[1:])
        places = (places.index_select(dim, row.flatten() - begin).view(split) + coordinate).gather(
            dim + 1, chosen.unsqueeze(dim + 1)
        ).squeeze(dim + 1)  # fmt: skip
        outside = torch.tensor(without, device=local.device).view(beside)
        values, places = values.masked_fill(outside, -math.inf), places.masked_fill(outside, _NOWHERE)
    return values, places


def _largest_of_all(
    values: torch.Tensor, places: torch.Tensor, mesh: DeviceMesh, axis: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same over the ranks of a mesh axis."""
    size = mesh.size(axis)
    all_values = everywhere(values.unsqueeze(0), mesh, axis, 0, size, 0, size)
    all_places = everywhere(places.unsqueeze(0), mesh, axis, 0, size, 0, size)
    values = all_values.amax(0)
    largest = (all_values == values) | all_values.isnan()
    return values, all_places.masked_fill(~largest, _NOWHERE).amin(0)


@rule("adaptive_max_pool2d", "adaptive_max_pool3d")
def adaptive_max_pool(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The output and its indices, flat ones of the whole image, are whole on every rank of the cut axes."""
    input, sizes = bound(op, args, kwargs)
    # Of no bin or less, or what is not ordered, as one device has it.
    fits = min(sizes) > 0 and not input.is_complex() and input.dtype is not torch.bool
    if not is_cut(input) or input.dim() != len(sizes) + 2 or not fits:
        return unruled(op, args, kwargs)
    local, mesh, placements = arrange(op, input, any_dim)
    cut = cut_of(mesh, placements, input.shape)
    assert cut is not None
    mark(mesh, cut.axes)
    values, places = _largest_of_own(local, input.shape, list(sizes), mesh, placements)
    for axis in cut.axes:
        values, places = _largest_of_all(values, places, mesh, axis)
    kept = tuple(Replicate() if axis in cut.axes else p for axis, p in enumerate(placements))
    shape = torch.Size([*input.shape[:2], *sizes])
    like = input if input.dim() == 4 else None
    return wrap_in_format(values, mesh, kept, shape, like), wrap_in_format(places, mesh, kept, shape, like)


@rule("adaptive_max_pool2d_backward", "adaptive_max_pool3d_backward")
def adaptive_max_pool_backward(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grad_output, input, indices = bound(op, args, kwargs)
    if not is_cut(input) or input.dim() != (4 if "2d" in op._schema.name else 5):
        return unruled(op, args, kwargs)
    local, mesh, placements = arrange(op, input, any_dim)
    cut = cut_of(mesh, placements, input.shape)
    assert cut is not None
    kept = tuple(Replicate() if axis in cut.axes else p for axis, p in enumerate(placements))
    grad, place = local_as(grad_output, mesh, kept).flatten(2), local_as(indices, mesh, kept).flatten(2)
    grad_input = torch.zeros_like(local)
    if local.numel() == 0:
        return wrap(grad_input, mesh, placements, input.shape)
    own, step = torch.zeros_like(place), 1
    inside = torch.ones_like(place, dtype=torch.bool)
    for dim in range(input.dim() - 1, 1, -1):
        begin, end = _owned(input.shape, dim, mesh, placements)
        row = place % input.size(dim)
        place = place // input.size(dim)
        inside &= (row >= begin) & (row < end)
        own += (row - begin) * step
        step *= end - begin
    plane = torch.zeros([*local.shape[:2], step], dtype=grad.dtype, device=grad.device)
    plane.scatter_add_(2, own.masked_fill(~inside, 0), grad.masked_fill(~inside, 0))
    grad_input.copy_(plane.view(local.shape))
    return wrap(grad_input, mesh, placements, input.shape)
