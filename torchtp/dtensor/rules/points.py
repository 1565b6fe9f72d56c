"""Points picked by lists of numbers, or by a mask, out of dims that are cut, and put into them: each goes to whichever rank is to hold it.

Lists are the same on all ranks, so that each knows of every point which rank has it (`routing.py`): of centres of objects, pixels that a
loss draws, tokens that are kept, rows in another order, a rank sends what it has of them and nothing else of the image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchtp.dtensor import notice
from torchtp.dtensor.cut import Placements, axes_cutting, axes_of, full_of, interval
from torchtp.dtensor.routing import Holders, holders, routed
from torchtp.dtensor.sharing import hand_out, local_as
from torchtp.dtensor.spatial import is_spatial
from torchtp.dtensor.upstream import DeviceMesh, Op, Replicate, Shard, plain_shard

Lists = list[torch.Tensor | None]  # one for each dim of a tensor


def lists_of(op: Op, indices: Sequence[torch.Tensor | None], shape: torch.Size) -> Lists | None:
    """The numbers that pick out of a tensor of that shape, whole on every rank; of a mask those of its points.

    None of what is no such index. IndexError for a mask of other extents.
    """
    lists: Lists = []
    for index in indices:
        if index is None:
            lists.append(None)
            continue
        if index.dtype not in (torch.int64, torch.int32, torch.bool, torch.uint8) or index.dim() == 0:
            return None
        mask = index.dtype in (torch.bool, torch.uint8)
        if mask and index.shape != shape[len(lists) : len(lists) + index.dim()]:
            raise IndexError(
                f"The shape of the mask {list(index.shape)} does not match the shape of the indexed tensor {list(shape)} "
                f"from dimension {len(lists)} on"
            )
        if is_spatial(index):
            notice.gathering(op, index.shape, index.dtype)
        whole = full_of(index)
        lists += whole.nonzero(as_tuple=True) if mask else [whole.to(torch.int64)]
    return lists + [None] * (len(shape) - len(lists)) if len(lists) <= len(shape) else None


@dataclass(frozen=True)
class Picked:
    """How what is picked out of a cut tensor is shaped and cut."""

    mesh: DeviceMesh
    axes: list[int]  # that cut dims of the tensor with lists, or a mask
    shape: torch.Size
    placements: Placements

    def part_of(self, values: torch.Tensor) -> torch.Tensor:
        """This rank's part of values that broadcast to what is picked."""
        if values.shape != self.shape:
            hand_out(values)
            values = full_of(values).expand(self.shape)
        return local_as(values, self.mesh, self.placements)


@dataclass(frozen=True)
class Points(Picked):
    """Points of a tensor of some shape under some placements."""

    at: int  # the first dim of the picked that counts points
    num_dims: int  # how many of these there are
    numbers: Lists  # of this rank's points, in its own rows
    now: Holders  # of every point, flattened
    wanted: Holders

    def pick(self, local: torch.Tensor) -> torch.Tensor:
        """This rank's part of what is picked out of a tensor of which it has `local`."""
        rows = torch.ops.aten.index.Tensor(local, self.numbers)
        return self._shaped(self._brought(rows, self.now, self.wanted))

    def put(self, local: torch.Tensor, values: torch.Tensor, accumulate: bool) -> None:
        """Writes this rank's part of `values`, shaped and cut as what is picked, to where the points lie, or adds it there."""
        rows = values.flatten(self.at, self.at + self.num_dims - 1)
        torch.ops.aten.index_put_(local, self.numbers, self._brought(rows, self.wanted, self.now), accumulate)

    def _brought(self, rows: torch.Tensor, now: Holders, wanted: Holders) -> torch.Tensor:
        """Rows where others are to hold them; themselves where no dim with lists is cut, as of channels."""
        return routed(rows, self.mesh, self.axes, self.at, now, wanted) if self.axes else rows

    def _shaped(self, rows: torch.Tensor) -> torch.Tensor:
        extents = []
        for dim in range(self.at, self.at + self.num_dims):
            begin, end = interval(self.mesh, self.placements, dim, self.shape[dim])
            extents.append(end - begin)
        return rows.unflatten(self.at, extents)


def points_of(shape: torch.Size, mesh: DeviceMesh, placements: Placements, lists: Lists) -> Points | None:
    """The points where a tensor that is cut so has them; None where lists do not fit each other, which one device tells best.

    Raises IndexError for a number beyond its dim, on all ranks.
    """
    chosen = [dim for dim, numbers in enumerate(lists) if numbers is not None]
    try:
        together = torch.broadcast_tensors(*(numbers for numbers in lists if numbers is not None))
    except RuntimeError:
        return None
    extents = together[0].shape
    given = {dim: numbers.reshape(-1) for dim, numbers in zip(chosen, together, strict=True)}
    at = chosen[0] if chosen[-1] - chosen[0] + 1 == len(chosen) else 0
    longest = at + max(range(len(extents)), key=lambda dim: extents[dim])
    rest = [dim for dim in range(len(shape)) if dim not in given]
    places = {dim: place if place < at else place + len(extents) for place, dim in enumerate(rest)}
    after = tuple(Shard(places.get(p.dim, longest)) if plain_shard(p) else Replicate() for p in placements)
    picked = [shape[dim] for dim in rest]
    picked[at:at] = extents
    axes = axes_cutting(placements, chosen)
    own: Lists = [given.get(dim) for dim in range(len(shape))]
    now, wanted = Holders(), Holders()
    if axes:
        on_host = {dim: _within(numbers.cpu(), shape[dim], dim) for dim, numbers in given.items()}
        now = _holders_of(mesh, placements, axes, shape, on_host)
        wanted = holders(mesh, after, axes, range(at, at + len(extents)), extents)
        own = _of_this_rank(mesh, placements, axes, shape, on_host, now, together[0].device)
    return Points(mesh, axes, torch.Size(picked), after, at, len(extents), own, now, wanted)


def _of_this_rank(
    mesh: DeviceMesh,
    placements: Placements,
    axes: Sequence[int],
    shape: torch.Size,
    numbers: dict[int, torch.Tensor],
    now: Holders,
    device: torch.device,
) -> Lists:
    """The points that this rank has, in its own rows."""
    ranks = axes_of(mesh).ranks
    mine = torch.ones_like(now[0], dtype=torch.bool)
    for axis, of in zip(axes, now, strict=True):
        mine &= of == ranks[axis]
    own: Lists = [None] * len(shape)
    for dim, each in numbers.items():
        begin, _ = interval(mesh, placements, dim, shape[dim])
        own[dim] = (each[mine] - begin).to(device)
    return own


def _holders_of(
    mesh: DeviceMesh, placements: Placements, axes: Sequence[int], shape: torch.Size, numbers: dict[int, torch.Tensor]
) -> Holders:
    """Of every point, on each of the axes, the rank that has it."""
    found: dict[int, torch.Tensor] = {}
    for dim, each in numbers.items():
        cutting = [axis for axis in axes if placements[axis].is_shard(dim)]
        of_rows = holders(mesh, placements, cutting, [dim], [shape[dim]])
        found.update((axis, ranks[each]) for axis, ranks in zip(cutting, of_rows, strict=True))
    return [found[axis] for axis in axes]


def _within(numbers: torch.Tensor, extent: int, dim: int) -> torch.Tensor:
    """The numbers, those counted from the end counted from the beginning."""
    beyond = numbers[(numbers < -extent) | (numbers >= extent)]
    if len(beyond):
        raise IndexError(f"index {beyond[0].item()} is out of bounds for dimension {dim} with size {extent}")
    return torch.where(numbers < 0, numbers + extent, numbers)
