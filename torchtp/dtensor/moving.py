"""Rows of a cut dim moved to where an op needs them: intervals out of chunks, and back into chunks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchtp.dtensor.cut import Placements, axes_cutting, axes_of, interval, owned, sums_done
from torchtp.dtensor.upstream import (
    DeviceMesh,
    DTensor,
    DTensorSpec,
    Partial,
    Placement,
    Replicate,
    Shard,
    local_of,
    make_spec,
    plain_shard,
    redistributed,
    spec_of,
)
from torchtp.dtensor.wrapping import Function, in_order, on_mesh, wrap

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


def only_row(local: torch.Tensor, mesh: DeviceMesh, placements: Placements, dim: int) -> torch.Tensor:
    """The one row of a dim on every rank of the axes that cut it."""
    for axis in reversed(axes_cutting(placements, [dim])):
        if interval(mesh, placements[:axis], dim, 1) == (0, 1):  # else no rank of this one's group has it
            local = everywhere(local, mesh, axis, dim, 1, 0, 1)
    return local


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
    sent = torch.cat([piece.reshape(-1) for piece in pieces])
    counts = [math.prod(shape) for shape in shapes]
    arrived = sent_around(sent, [piece.numel() for piece in pieces], counts, mesh, axis)
    parts = arrived.split(counts)
    return torch.cat([part.view(shape) for part, shape in zip(parts, shapes, strict=True)], dim)


def sent_around(flat: torch.Tensor, sent: list[int], arriving: list[int], mesh: DeviceMesh, axis: int) -> torch.Tensor:
    """An alltoall over a mesh axis of elements of any dtype: `sent[r]` go to rank r, `arriving[r]` come from it."""
    itemsize = flat.element_size()
    arrived = functional.all_to_all_single(
        flat.view(torch.uint8),
        [count * itemsize for count in arriving],
        [count * itemsize for count in sent],
        axes_of(mesh).groups[axis],
    )
    return functional.wait_tensor(arrived).view(flat.dtype)


def recut(local: torch.Tensor, spec: DTensorSpec, placements: Placements) -> torch.Tensor:
    """The local tensor under other placements; where another dim is to be cut, a rank sends no more than it holds."""
    if spec.placements == placements:
        return local
    assert spec.tensor_meta is not None
    if not axes_of(spec.mesh).ranks:
        return redistributed(local, spec, placements)
    cut_anew = _cut_anew(local, spec, spec.tensor_meta.shape, placements)
    # What was sent lies in the order of its dims, on ranks with gaps or without; slices of what was whole stay views.
    sliced = all(
        now == then or isinstance(now, Replicate) for now, then in zip(spec.placements, placements, strict=True)
    )
    return cut_anew if sliced else in_order(cut_anew, spec.tensor_meta.stride)


def _cut_anew(local: torch.Tensor, spec: DTensorSpec, shape: torch.Size, placements: Placements) -> torch.Tensor:
    mesh, now = spec.mesh, list(spec.placements)
    assert spec.tensor_meta is not None
    steps = _swaps(now, placements, shape)
    for axis, dim in steps:
        old = now[axis]
        assert isinstance(old, Shard)
        begin, end = interval(mesh, tuple(now[:axis]), old.dim, shape[old.dim])
        local = swapped(local, mesh, axis, old.dim, end - begin, dim)
        now[axis] = Shard(dim)
    swaps = make_spec(mesh, tuple(now), shape, spec.tensor_meta.stride, spec.tensor_meta.dtype)
    return redistributed(local, swaps, placements)


def _swaps(before: Sequence[Placement], after: Placements, shape: torch.Size) -> list[tuple[int, int]]:
    """The axes that are to cut another dim and this dim, in an order in which none has to know of what inner axes cut.

    Inside of what outer axes have cut of two dims, parts are swapped as if there were nothing else. Where axes take each
    other's dims, one cuts a third dim meanwhile, if there is one. What has no such order is left out.
    """
    now, steps, gave_way = list(before), list[tuple[int, int]](), False

    def may_cut(axis: int, dim: int) -> bool:
        old = now[axis]
        return plain_shard(old) and not any(p.is_shard(d) for p in now[axis + 1 :] for d in (old.dim, dim))

    while True:
        others = [
            (axis, new.dim)
            for axis, new in enumerate(after)
            if plain_shard(new) and plain_shard(now[axis]) and new != now[axis]
        ]
        possible = [step for step in others if may_cut(*step)]
        clear = [(axis, dim) for axis, dim in possible if not any(place.is_shard(dim) for place in now)]
        if not clear and len(others) > 1 and not gave_way:
            gave_way = True
            free = [dim for dim in range(len(shape)) if not any(p.is_shard(dim) for p in (*now, *after))]
            longest = max(free, key=lambda dim: shape[dim], default=None)
            clear = [(axis, longest) for axis, _ in others[::-1] if longest is not None and may_cut(axis, longest)]
        if not (clear or possible):
            return steps
        axis, dim = (clear or possible)[0]
        steps.append((axis, dim))
        now[axis] = Shard(dim)


def recut_tensor(tensor: DTensor, placements: Placements) -> DTensor:
    """The same of a DTensor, outside autograd."""
    return wrap(recut(local_of(tensor), spec_of(tensor), placements), tensor.device_mesh, placements, tensor.shape)


def put_into(part: DTensor, whole: DTensor) -> None:
    """Writes a tensor into another of its shape, however each is cut."""
    local_of(whole).copy_(recut(local_of(part), spec_of(part), spec_of(whole).placements))


def gathers(old: Placements, new: Placements) -> bool:
    """Whether `recut` makes something whole that was cut."""
    changes = [pair for pair in zip(old, new, strict=True) if pair[0] != pair[1]]
    return any(not isinstance(a, (Replicate, Partial)) and not (plain_shard(a) and plain_shard(b)) for a, b in changes)


class Recut(Function):
    """A DTensor under other placements; so is its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor, placements: Placements) -> DTensor:
        ctx.mesh, ctx.placements = tensor.device_mesh, sums_done(tensor.placements)
        return recut_tensor(tensor, placements)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[DTensor, None]:
        return Recut.apply(on_mesh(grad, ctx.mesh), ctx.placements), None


def all_reduced(local: torch.Tensor, mesh: DeviceMesh, axes: list[int], reduce_op: str = "sum") -> torch.Tensor:
    """The sum (or what `reduce_op` says) of the local tensors over mesh axes."""
    if not axes:
        return local
    placements = tuple(Partial(reduce_op) if axis in axes else Replicate() for axis in range(mesh.ndim))
    spec = make_spec(mesh, placements, local.shape, local.stride(), local.dtype)
    return redistributed(local, spec, (Replicate(),) * mesh.ndim)


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
