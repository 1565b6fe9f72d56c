"""How DTensors are cut: from placements to the cut lists of the spatial ops and back, remembered for each mesh."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import torch

from torchtp.dtensor.origins import Origins, Placements
from torchtp.dtensor.upstream import (
    DeviceMesh,
    DTensor,
    DTensorSpec,
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    forget_shapes,
    local_of,
    plain_shard,
    real_mesh,
    redistributed,
    spec_of,
)


@dataclass(frozen=True)
class Cut:
    """The spatial dims that are cut: the three lists of a torchtp op, and the mesh axes they stand for."""

    dims: list[int]
    extents: list[int]
    groups: list[str]
    axes: list[int]

    def of(self, extents: list[int]) -> Cut:
        """The same cut of a tensor with other extents on the cut dims."""
        return Cut(self.dims, extents, self.groups, self.axes)


@dataclass
class Axes:
    """What the rules ask of a mesh again and again, asked once."""

    sizes: tuple[int, ...]
    ranks: tuple[int, ...]  # none on a rank outside of the mesh
    groups: tuple[str, ...]
    spatial: set[int]  # of all meshes equal to this one
    averages: bool = False  # whether a forward on this mesh averages gradients for its program
    writes_into_plain: bool = False  # whether a DTensor was ever written into a plain tensor whose gradient is recorded
    few_rows: bool = False  # whether some rank ever held less than two rows of a cut dim
    tell_order: dict[tuple[Placements, torch.Size], bool] = field(default_factory=dict)
    cuts: dict[tuple[Placements, torch.Size], Cut | None] = field(default_factory=dict)
    specs: dict[tuple[object, ...], DTensorSpec] = field(default_factory=dict)
    outgrown: bool = False  # specs were dropped; PyTorch still remembers their shapes
    picked_from: Origins = field(default_factory=Origins)  # of points
    taken_from: Origins = field(default_factory=Origins)  # of sums and rows


MOST_SHAPES = 4096  # of which something is remembered: masks and detectors make other ones all the time
_ATTRIBUTE = "_torchtp_axes"
_spatial: dict[int, set[int]] = {}
_last: dict[int, tuple[object, ...]] = {}  # this process's ranks, and the groups, of the last mesh of that hash


def axes_of(mesh: DeviceMesh) -> Axes:
    """What is known of `mesh`; kept on the mesh itself, so that it lives as long as its groups."""
    axes = mesh.__dict__.get(_ATTRIBUTE)
    if axes is None:
        if (real := real_mesh(mesh)) is not mesh:
            return axes_of(real)
        inside = range(mesh.ndim if mesh.get_coordinate() is not None else 0)  # other ranks have no groups of it
        axes = Axes(
            tuple(mesh.size(axis) for axis in range(mesh.ndim)),
            tuple(mesh.get_local_rank(axis) for axis in inside),
            tuple(mesh.get_group(axis).group_name for axis in inside),
            _spatial.setdefault(hash(mesh), set()),
        )
        setattr(mesh, _ATTRIBUTE, axes)
        # Meshes of the same ranks are equal, and PyTorch remembers by them specs, with the mesh that came first, and sizes of
        # parts: of groups, and of this process's rank, that may be no more.
        now = axes.ranks, axes.groups
        if _last.setdefault(hash(mesh), now) != now:
            _last[hash(mesh)] = now
            forget_shapes()
    return axes


def note_taken(tensor: DTensor) -> None:
    """That something of the tensor is taken, a sum or rows: its gradient is to be cut as the tensor is."""
    spec = spec_of(tensor)
    axes_of(spec.mesh).taken_from.note(spec.shape, sums_done(spec.placements), tensor.requires_grad)


def cut_further(placements: Placements, like: Placements, takes: Callable[[int], bool]) -> Placements:
    """The placements, and on axes over which they are whole those of `like` that cut a dim which `takes`."""
    return tuple(
        there if isinstance(here, Replicate) and plain_shard(there) and takes(there.dim) else here
        for here, there in zip(placements, like, strict=True)
    )


def axes_cutting(placements: Placements, dims: Collection[int] | None = None) -> list[int]:
    """The mesh axes that cut some of the dims, by default any."""
    return [axis for axis, place in enumerate(placements) if plain_shard(place) and (dims is None or place.dim in dims)]


def shard_dim(placement: Placement) -> int | None:
    """The tensor dim that is cut, or None."""
    return placement.dim if isinstance(placement, (Shard, StridedShard)) else None


def cut_of(mesh: DeviceMesh, placements: Placements, shape: torch.Size) -> Cut | None:
    """The cut of dims 2 and up of a tensor [N, C, ...]; None where none is cut."""
    axes = axes_of(mesh)
    key = (placements, shape)
    try:
        return axes.cuts[key]
    except KeyError:
        pass
    chosen = [
        (placement.dim, axis)
        for axis, placement in enumerate(placements)
        if isinstance(placement, Shard) and placement.dim >= 2
    ]
    chosen.sort()
    if len({dim for dim, _ in chosen}) < len(chosen):
        raise NotImplementedError(f"an op on images is not made for {placements}, where several axes cut one dim")
    cut = None
    if chosen:
        cut = Cut(
            [dim for dim, _ in chosen],
            [shape[dim] for dim, _ in chosen],
            [axes.groups[axis] for _, axis in chosen],
            [axis for _, axis in chosen],
        )
    if len(axes.cuts) > MOST_SHAPES:
        axes.cuts.clear()
    axes.cuts[key] = cut
    return cut


def is_cut(tensor: object) -> bool:
    """Whether a spatial dim of [N, C, ...] is cut. An unbatched image has one dim less: it is given a batch first."""
    return isinstance(tensor, DTensor) and cut_of(tensor.device_mesh, tensor.placements, tensor.shape) is not None


def owned(extent: int, size: int, rank: int) -> tuple[int, int]:
    """The interval [begin, end) that `rank` of `size` holds of a dim of `extent`."""
    step = -(-extent // size)
    return min(extent, rank * step), min(extent, (rank + 1) * step)


def interval(mesh: DeviceMesh, placements: Placements, dim: int, extent: int) -> tuple[int, int]:
    """The rows [begin, end) this rank holds of a dim of `extent`, which several axes may cut; of the first axes, if only theirs are given."""
    axes = axes_of(mesh)
    begin, end = 0, extent
    for axis, placement in enumerate(placements):
        if plain_shard(placement) and placement.dim == dim:
            first, last = owned(end - begin, axes.sizes[axis], axes.ranks[axis])
            begin, end = begin + first, begin + last
    return begin, end


def dim_of(dim: int, num_dims: int) -> int:
    """A dim counted from the front, of a tensor of `num_dims`. IndexError on all ranks alike where there is none."""
    most = max(1, num_dims)  # a scalar takes 0 and -1
    if not -most <= dim < most:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-most}, {most - 1}], but got {dim})")
    return dim % most


def cut_locally(full: torch.Tensor, mesh: DeviceMesh, placements: Placements) -> torch.Tensor:
    """This rank's part of a tensor that every rank holds; no communication. Partial: the whole on rank 0 of the axis."""
    axes = axes_of(mesh)
    for axis, placement in enumerate(placements):
        if isinstance(placement, Partial):
            if placement.reduce_op != "sum":
                raise NotImplementedError(f"a replicated tensor does not become {placement}")
            if axes.ranks[axis] != 0:
                full = torch.zeros_like(full)
        elif not isinstance(placement, Replicate):
            if not plain_shard(placement):
                raise NotImplementedError(f"a replicated tensor is not cut as {placement} here")
            begin, end = owned(full.size(placement.dim), axes.sizes[axis], axes.ranks[axis])
            full = full.narrow(placement.dim, begin, end - begin)
    return full


def full_of(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor on every rank."""
    if not isinstance(tensor, DTensor):
        return tensor
    spec = spec_of(tensor)
    return redistributed(local_of(tensor), spec, (Replicate(),) * len(spec.placements))


def sums_done(placements: Placements) -> Placements:
    """The placements with what is still to be summed whole."""
    return tuple(Replicate() if isinstance(placement, Partial) else placement for placement in placements)


def plain_cuts(placements: Placements) -> Placements:
    """The placements as far as they cut as torch.chunk does; whole otherwise."""
    return tuple(placement if plain_shard(placement) else Replicate() for placement in placements)


def num_shards(mesh: DeviceMesh, placements: Placements) -> int:
    """How many pieces the tensor is cut into: over how many ranks a sum over its elements is partial."""
    number = 1
    for size, placement in zip(axes_of(mesh).sizes, placements, strict=True):
        if not isinstance(placement, Replicate):
            number *= size
    return number


def partial_over_shards(placements: Placements) -> Placements:
    """The placements of a sum over a tensor's cut dims: Partial where it is cut."""
    return tuple(placement if isinstance(placement, Replicate) else Partial() for placement in placements)
