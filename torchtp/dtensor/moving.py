"""Rows of a cut dim moved to where an op needs them: intervals out of chunks, and back into chunks."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from torchtp.dtensor.cut import axes_of, owned
from torchtp.dtensor.upstream import DeviceMesh

functional = torch.ops._c10d_functional

Wants = Callable[[int, int], tuple[int, int]]  # output rows [o0, o1) -> input rows [b, e)


def mirrored(extent: int) -> Wants:
    """Of a flip."""
    return lambda o0, o1: (extent - o1, extent - o0)


def shifted(by: int, low: int | None = None, high: int | None = None) -> Wants:
    """Output row o is input row o + by; rows outside [low, high) are left out where these are given."""

    def wants(o0: int, o1: int) -> tuple[int, int]:
        begin, end = o0 + by, o1 + by
        if low is not None:
            begin, end = max(low, begin), max(low, end)
        if high is not None:
            begin, end = min(high, begin), min(high, end)
        return begin, end

    return wants


def scaled(factor: int) -> Wants:
    """Output row o is input rows [o * factor, (o + 1) * factor)."""
    return lambda o0, o1: (o0 * factor, o1 * factor)


def pulled(
    local: torch.Tensor,
    mesh: DeviceMesh,
    axis: int,
    dim: int,
    extent: int,
    out_extent: int,
    wants: Wants,
    fill: float = 0,
) -> torch.Tensor:
    """The rows that this rank's chunk of a dim of `out_extent` needs of a dim of `extent`; beyond it they are `fill`."""
    begins, ends = _intervals(mesh, axis, out_extent, wants)
    return torch.ops.torchtp.pull(local, dim, extent, begins, ends, axes_of(mesh).groups[axis], fill)


def pushed(
    rows: torch.Tensor, mesh: DeviceMesh, axis: int, dim: int, extent: int, out_extent: int, wants: Wants
) -> torch.Tensor:
    """The adjoint: rows laid as `pulled` gives them, added up where they belong; returns this rank's chunk of `extent`."""
    begins, ends = _intervals(mesh, axis, out_extent, wants)
    return torch.ops.torchtp.push_add(rows, dim, extent, begins, ends, axes_of(mesh).groups[axis])


def everywhere(local: torch.Tensor, mesh: DeviceMesh, axis: int, dim: int, extent: int, begin: int, end: int) -> torch.Tensor:  # fmt: skip
    """Rows [begin, end) on every rank of the axis."""
    axes = axes_of(mesh)
    size = axes.sizes[axis]
    return torch.ops.torchtp.pull(local, dim, extent, [begin] * size, [end] * size, axes.groups[axis], 0)


def swapped(local: torch.Tensor, mesh: DeviceMesh, axis: int, dim: int, extent: int, other: int) -> torch.Tensor:
    """Of a part that is cut along `dim` (of `extent`), one that is cut along `other` instead, over the same axis."""
    axes = axes_of(mesh)
    size, rank = axes.sizes[axis], axes.ranks[axis]
    dense = local.resolve_conj().resolve_neg()
    pieces = [dense.narrow(other, begin, end - begin) for begin, end in _chunks(local.size(other), size)]
    shapes = []
    for begin, end in _chunks(extent, size):
        shape = list(pieces[rank].shape)
        shape[dim] = end - begin
        shapes.append(shape)
    sent = torch.cat([piece.reshape(-1) for piece in pieces]).view(torch.uint8)  # of any dtype, on any backend
    itemsize = local.element_size()
    counts = [math.prod(shape) * itemsize for shape in shapes]
    arrived = functional.all_to_all_single(
        sent, counts, [piece.numel() * itemsize for piece in pieces], axes.groups[axis]
    )
    arrived = functional.wait_tensor(arrived).view(local.dtype)
    parts = arrived.split([count // itemsize for count in counts])
    return torch.cat([part.view(shape) for part, shape in zip(parts, shapes, strict=True)], dim)


def chunk_of(mesh: DeviceMesh, axis: int, extent: int) -> tuple[int, int]:
    """The rows this rank has of a dim of `extent` that is cut over the axis."""
    axes = axes_of(mesh)
    return owned(extent, axes.sizes[axis], axes.ranks[axis])


def same_chunks(mesh: DeviceMesh, axis: int, extent: int, factor: int) -> bool:
    """Whether chunks of a dim of `extent` are, times `factor`, the chunks of a dim of `extent * factor`."""
    size = axes_of(mesh).sizes[axis]
    return all(
        tuple(factor * edge for edge in owned(extent, size, rank)) == owned(extent * factor, size, rank)
        for rank in range(size)
    )


def _intervals(mesh: DeviceMesh, axis: int, out_extent: int, wants: Wants) -> tuple[list[int], list[int]]:
    size = axes_of(mesh).sizes[axis]
    begins, ends = [], []
    for rank in range(size):
        o0, o1 = owned(out_extent, size, rank)
        begin, end = wants(o0, o1) if o0 < o1 else (0, 0)
        begins.append(begin)
        ends.append(max(begin, end))
    return begins, ends


def _chunks(extent: int, size: int) -> list[tuple[int, int]]:
    return [owned(extent, size, rank) for rank in range(size)]
