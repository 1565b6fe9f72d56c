"""Elements picked by a mask that is cut as the tensor is, and put where it is true, without the mask of another rank.

They come in the order of the whole. The elements of one row of the dims before the last cut one are in one stretch on each rank; how many
each stretch has is all that ranks tell each other, and says of every element where it goes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchtp.dtensor.cut import Placements, axes_cutting, axes_of, owned
from torchtp.dtensor.moving import all_reduced, sent_around
from torchtp.dtensor.rules.points import Picked
from torchtp.dtensor.sharing import local_as
from torchtp.dtensor.upstream import DeviceMesh, Replicate, Shard, plain_shard

aten = torch.ops.aten


@dataclass(frozen=True)
class Passing:
    """One alltoall: how many elements go to each rank of an axis, in their order, and how many come from each."""

    axis: int
    given: list[int]
    taken: list[int]
    places: torch.Tensor | None  # of what comes, rank by rank; None: it comes in order


@dataclass(frozen=True)
class Masked(Picked):
    """The elements of a tensor of some shape and placements where a mask of some of its dims is true."""

    at: int  # the mask's first dim, and the one that counts the picked
    num_dims: int  # of the mask
    numbers: torch.Tensor  # of the elements in this rank's part, its dims of the mask flattened
    passings: list[Passing]  # from where elements are to where they are to be

    def pick(self, local: torch.Tensor) -> torch.Tensor:
        """This rank's part of what is picked out of a tensor of which it has `local`."""
        rows = (
            local.flatten(self.at, self.at + self.num_dims - 1).index_select(self.at, self.numbers).movedim(self.at, 0)
        )
        for each in self.passings:
            rows = self._sent(rows, each.given, each.taken, each.axis)
            if each.places is not None:
                rows = torch.empty_like(rows).index_copy_(0, each.places.to(rows.device), rows)
        return rows.movedim(0, self.at).contiguous()

    def put(self, local: torch.Tensor, values: torch.Tensor, accumulate: bool) -> None:
        """Writes this rank's part of `values`, shaped and cut as what is picked, to where the mask is true, or adds it there."""
        rows = values.movedim(self.at, 0)
        for each in reversed(self.passings):
            if each.places is not None:
                rows = rows.index_select(0, each.places.to(rows.device))
            rows = self._sent(rows, each.taken, each.given, each.axis)
        rows = rows.movedim(0, self.at)
        flat = local.flatten(self.at, self.at + self.num_dims - 1)
        if accumulate:  # no element is picked twice
            rows = flat.index_select(self.at, self.numbers) + rows
        flat.index_copy_(self.at, self.numbers, rows)
        if flat.data_ptr() != local.data_ptr():  # of a part whose elements do not lie so that it could be a view
            local.copy_(flat.view(local.shape))

    def _sent(self, rows: torch.Tensor, given: list[int], taken: list[int], axis: int) -> torch.Tensor:
        rows = rows.resolve_conj().resolve_neg().contiguous()
        width = math.prod(rows.shape[1:])
        sent, arriving = ([count * width for count in counts] for counts in (given, taken))
        flat = rows.as_strided([rows.numel()], [1])  # a view may give a single element any stride
        return sent_around(flat, sent, arriving, self.mesh, axis).view(sum(taken), *rows.shape[1:])


class _Stretches:
    """How many elements each stretch has, and where in the order of all its first one comes.

    The dims of these tables are the mask's before its last cut one, and the parts of that one.
    """

    def __init__(
        self, mesh: DeviceMesh, placements: Placements, axes: Sequence[int], shape: torch.Size, mask: torch.Tensor
    ):
        self.sizes = axes_of(mesh).sizes
        self.dims = {axis: _dim(placements, axis) for axis in axes}
        self.last = max(self.dims.values())
        self.extents = list(shape[: self.last])
        self.extents.append(math.prod(self.sizes[axis] for axis in axes if self.dims[axis] == self.last))
        self.mine = {axis: axes_of(mesh).ranks[axis] for axis in axes}
        counted = mask.flatten(self.last).sum(-1).unsqueeze(-1)
        table = counted.new_zeros(self.extents)
        table[tuple(each.to(table.device) for each in self.of(self.mine))] = counted
        self.counts = all_reduced(table, mesh, list(axes)).cpu()
        self.total = int(self.counts.sum())
        self.begins = _before(self.counts)

    def of(self, ranks: dict[int, int]) -> tuple[torch.Tensor, ...]:
        """The index of the stretches of all ranks with these numbers on these axes, in order."""
        rows = []
        for dim, extent in enumerate(self.extents):
            chunks = [(0, extent)]
            for axis in (axis for axis, of in self.dims.items() if of == dim):
                chosen = [ranks[axis]] if axis in ranks else range(self.sizes[axis])
                chunks = [self.part(chunk, axis, rank) for chunk in chunks for rank in chosen]
            each = torch.cat([torch.arange(begin, end, device="cpu") for begin, end in chunks])
            rows.append(each.view([-1 if place == dim else 1 for place in range(len(self.extents))]))
        return tuple(rows)

    def part(self, chunk: tuple[int, int], axis: int, rank: int) -> tuple[int, int]:
        """What a rank of the axis has of an interval."""
        begin, end = owned(chunk[1] - chunk[0], self.sizes[axis], rank)
        return chunk[0] + begin, chunk[0] + end

    def within(self, chunk: tuple[int, int], of: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """How many elements of these stretches come in that part of the order."""
        begins = self.begins[of]
        return ((begins + self.counts[of]).clamp(max=chunk[1]) - begins.clamp(min=chunk[0])).clamp(min=0)

    def passings(self) -> list[Passing]:
        """The ways of all elements to the ranks that are to have them: as torch.chunk cuts, over one axis after the other."""
        chunk, found = (0, self.total), []
        axes = list(self.dims)
        for place, axis in enumerate(axes):
            still = {other: self.mine[other] for other in axes[place:]}
            mine = self.of(still)
            given = [int(self.within(self.part(chunk, axis, rank), mine).sum()) for rank in range(self.sizes[axis])]
            chunk = self.part(chunk, axis, self.mine[axis])
            every = self.of({other: rank for other, rank in still.items() if other != axis})
            firsts = torch.zeros_like(self.counts)
            firsts[every] = _before(self.within(chunk, every))
            sources = [self.of({**still, axis: rank}) for rank in range(self.sizes[axis])]
            counts = [self.within(chunk, of).flatten() for of in sources]
            places = _places(torch.cat([firsts[of].flatten() for of in sources]), torch.cat(counts))
            found.append(Passing(axis, given, [int(each.sum()) for each in counts], places))
        return found


def _places(firsts: torch.Tensor, counts: torch.Tensor) -> torch.Tensor | None:
    """Where the elements of stretches go, of which the first ones go to `firsts`; None where they are in order."""
    ordered = firsts[counts > 0]
    if bool((ordered[1:] > ordered[:-1]).all()):
        return None
    return (firsts - _before(counts)).repeat_interleave(counts) + torch.arange(int(counts.sum()), device="cpu")


def _dim(placements: Placements, axis: int) -> int:
    placement = placements[axis]
    assert isinstance(placement, Shard)
    return placement.dim


def _before(counts: torch.Tensor) -> torch.Tensor:
    """The sum of all that come before, for each."""
    return (counts.flatten().cumsum(0) - counts.flatten()).view(counts.shape)


def masked_of(
    shape: torch.Size, mesh: DeviceMesh, placements: Placements, at: int, mask: torch.Tensor
) -> Masked | None:
    """The elements of a tensor that is cut so where a mask of its dims from `at` on is true; None where none of these is cut."""
    num_dims = mask.dim()
    axes = axes_cutting(placements, range(at, at + num_dims))
    if not axes:
        return None
    of_mask = tuple(
        Shard(p.dim - at) if axis in axes and plain_shard(p) else Replicate() for axis, p in enumerate(placements)
    )
    local = local_as(mask, mesh, of_mask)
    stretches = _Stretches(mesh, of_mask, axes, mask.shape, local)
    after = list(placements)
    for axis, place in enumerate(placements):
        if plain_shard(place) and place.dim >= at:
            after[axis] = Shard(at if axis in axes else place.dim - num_dims + 1)
    picked = torch.Size([*shape[:at], stretches.total, *shape[at + num_dims :]])
    passings = stretches.passings()
    numbers = local.flatten().nonzero().squeeze(1)
    return Masked(mesh, axes, picked, tuple(after), at, num_dims, numbers, passings)
