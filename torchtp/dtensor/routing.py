"""Rows of dims that several mesh axes cut, brought to whichever rank is to hold them: one alltoall an axis.

Where it is known of every row, on every axis, which rank holds it and which is to hold it, a row goes to its place along one axis
after the other. So a tensor that two axes cut along two dims becomes one whose merged dim both cut, one inside the other, and the
other way round; slices of such a dim and what is put together along it are cut anew.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from torchtp.dtensor.cut import Placements, axes_cutting, axes_of, interval, owned
from torchtp.dtensor.moving import sent_around
from torchtp.dtensor.upstream import DeviceMesh, DTensor, Placement, Shard, local_of, plain_shard, spec_of
from torchtp.dtensor.wrapping import dense_stride, wrap

Holders = list[torch.Tensor]  # for each of some mesh axes, of every row: the rank that holds it, in two bytes


def holders(mesh: DeviceMesh, placements: Placements, axes: Sequence[int], dims: Sequence[int], extents: Sequence[int]) -> Holders:  # fmt: skip
    """Of every element of a box, flattened, whose dims are those `dims` of a tensor: the ranks that hold it.

    Each of `axes` cuts one of the dims, inside of what those before it have cut.
    """
    sizes = axes_of(mesh).sizes
    chunks = [[extent] for extent in extents]  # how long they are, of each dim
    found = []
    for axis in axes:
        placement = placements[axis]
        assert isinstance(placement, Shard)
        of = dims.index(placement.dim)
        edges = [owned(length, sizes[axis], rank) for length in chunks[of] for rank in range(sizes[axis])]
        ranks = torch.arange(sizes[axis], dtype=torch.int16, device="cpu").repeat(len(chunks[of]))
        chunks[of] = [end - begin for begin, end in edges]
        along = ranks.repeat_interleave(torch.tensor(chunks[of], device="cpu"))
        shape = [extent if place == of else 1 for place, extent in enumerate(extents)]
        found.append(along.view(shape).expand(*extents).reshape(-1))
    return found


def routed(local: torch.Tensor, mesh: DeviceMesh, axes: Sequence[int], dim: int, now: Holders, wanted: Holders) -> torch.Tensor:  # fmt: skip
    """A copy of this rank's rows along `dim`, in their order, before and after; the holders are the same on all ranks.

    It lies in memory in the order that the part had: a view's strides tell where its elements lie, and masks are drawn in that order.
    """
    given = local
    mine = [axes_of(mesh).ranks[axis] for axis in axes]
    now = list(now)
    for place, axis in enumerate(axes):
        if torch.equal(now[place], wanted[place]):
            continue
        among = torch.ones_like(now[place], dtype=torch.bool)  # what this rank's group of the axis holds
        for other, rank in enumerate(mine):
            if other != place:
                among &= now[other] == rank
        to = wanted[place][among & (now[place] == mine[place])]
        of = now[place][among & (wanted[place] == mine[place])]
        local = _passed_on(local, mesh, axis, dim, to, of, given.stride())
        now[place] = wanted[place]
    return local.clone() if local is given else local


def _passed_on(local: torch.Tensor, mesh: DeviceMesh, axis: int, dim: int, to: torch.Tensor, of: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:  # fmt: skip
    """One alltoall: row i of this rank goes to rank `to[i]` of the axis, and row i of the result comes from rank `of[i]`.

    `order`: strides of what was given first; those of a single row, which this may be on the way, tell none.
    """
    rows = local.resolve_conj().resolve_neg().movedim(dim, 0)
    size, width = axes_of(mesh).sizes[axis], math.prod(rows.shape[1:])
    sent = rows.index_select(0, torch.argsort(to, stable=True).to(rows.device))
    given, taken = ((torch.bincount(ranks, minlength=size) * width).tolist() for ranks in (to, of))
    arrived = sent_around(sent.reshape(-1), given, taken, mesh, axis).view(len(of), *rows.shape[1:])
    places = torch.argsort(of, stable=True).to(rows.device)
    shape = torch.Size([*local.shape[:dim], len(of), *local.shape[dim + 1 :]])
    result = arrived.new_empty_strided(shape, dense_stride(shape, order))
    result.movedim(dim, 0).index_copy_(0, places, arrived)
    return result


def merged(tensor: DTensor, dims: Sequence[int]) -> DTensor:
    """Consecutive dims as one, which all axes cut that cut one of them; a copy."""
    spec = spec_of(tensor)
    mesh, placements, first, last = spec.mesh, spec.placements, dims[0], dims[-1]
    extents = [tensor.size(dim) for dim in dims]
    shape = torch.Size([*tensor.shape[:first], math.prod(extents), *tensor.shape[last + 1 :]])
    axes = axes_cutting(placements, dims)
    after: list[Placement] = [_moved(place, last, first - last) for place in placements]
    for axis in axes:
        after[axis] = Shard(first)
    rows = local_of(tensor).flatten(first, last)
    now = holders(mesh, placements, axes, dims, extents)
    wanted = holders(mesh, tuple(after), axes, [first], [shape[first]])
    return wrap(routed(rows, mesh, axes, first, now, wanted), mesh, tuple(after), shape)


def split(tensor: DTensor, dim: int, extents: Sequence[int]) -> DTensor | None:
    """A dim that several axes cut as several dims, of which the last ones are cut, by an axis each; None where they are too small."""
    spec = spec_of(tensor)
    mesh, placements = spec.mesh, spec.placements
    axes = axes_cutting(placements, [dim])
    wide = [place for place, extent in enumerate(extents) if extent > 1]
    chosen = wide[-len(axes) :]
    sizes = axes_of(mesh).sizes
    if len(wide) < len(axes) or any(extents[of] < sizes[axis] for of, axis in zip(chosen, axes, strict=True)):
        return None
    after: list[Placement] = [_moved(place, dim, len(extents) - 1) for place in placements]
    for of, axis in zip(chosen, axes, strict=True):
        after[axis] = Shard(dim + of)
    dims = [dim + of for of in range(len(extents))]
    now = holders(mesh, placements, axes, [dim], [tensor.size(dim)])
    wanted = holders(mesh, tuple(after), axes, dims, extents)
    rows = routed(local_of(tensor), mesh, axes, dim, now, wanted)
    shape = torch.Size([*tensor.shape[:dim], *extents, *tensor.shape[dim + 1 :]])
    parts = [interval(mesh, tuple(after), d, shape[d]) for d in dims]
    return wrap(rows.unflatten(dim, [end - begin for begin, end in parts]), mesh, tuple(after), shape)


def picked(tensor: DTensor, dim: int, rows: range) -> DTensor:
    """Some rows of a dim that several axes cut, cut anew; a copy."""
    spec = spec_of(tensor)
    mesh, placements, extent = spec.mesh, spec.placements, tensor.size(dim)
    axes = axes_cutting(placements, [dim])
    now = _of_picked(holders(mesh, placements, axes, [dim], [extent]), rows)
    wanted = holders(mesh, placements, axes, [dim], [len(rows)])
    local = routed(_mine(tensor, dim, rows), mesh, axes, dim, now, wanted)
    return wrap(local, mesh, placements, torch.Size([*tensor.shape[:dim], len(rows), *tensor.shape[dim + 1 :]]))


def put(part: torch.Tensor, whole: DTensor, dim: int, rows: range) -> None:
    """Writes into some rows of a dim that several axes cut; `part` is this rank's of a tensor that is cut as the whole."""
    spec = spec_of(whole)
    mesh, placements = spec.mesh, spec.placements
    axes = axes_cutting(placements, [dim])
    now = holders(mesh, placements, axes, [dim], [len(rows)])
    wanted = _of_picked(holders(mesh, placements, axes, [dim], [whole.size(dim)]), rows)
    _mine(whole, dim, rows).copy_(routed(part, mesh, axes, dim, now, wanted))


def joined(parts: Sequence[torch.Tensor], extents: Sequence[int], mesh: DeviceMesh, placements: Placements, dim: int) -> torch.Tensor:  # fmt: skip
    """This rank's part of what tensors of these extents are along a dim that several axes cut, one behind the other."""
    axes = axes_cutting(placements, [dim])
    each = [holders(mesh, placements, axes, [dim], [extent]) for extent in extents]
    now = [torch.cat(of_axis) for of_axis in zip(*each, strict=True)]
    wanted = holders(mesh, placements, axes, [dim], [sum(extents)])
    return routed(torch.cat(list(parts), dim), mesh, axes, dim, now, wanted)


def _of_picked(every: Holders, rows: range) -> Holders:
    return [ranks[rows.start : rows.stop : rows.step] for ranks in every]


def _mine(tensor: DTensor, dim: int, rows: range) -> torch.Tensor:
    """A view of those of the rows that this rank holds."""
    begin, end = interval(tensor.device_mesh, spec_of(tensor).placements, dim, tensor.size(dim))
    behind = -(-(max(begin, rows.start) - rows.start) // rows.step)  # how many of them lie before this rank's
    first = rows.start + behind * rows.step
    last = max(first, min(end, rows.stop))
    local = local_of(tensor)
    if first >= end:
        return local.narrow(dim, 0, 0)
    return torch.ops.aten.slice(local, dim, first - begin, last - begin, rows.step)


def _moved(place: Placement, behind: int, by: int) -> Placement:
    """The placement after dims were put in or taken out before those behind `behind`."""
    return Shard(place.dim + by) if plain_shard(place) and place.dim > behind else place
