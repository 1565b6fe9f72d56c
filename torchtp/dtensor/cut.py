"""How DTensors are cut: from placements to the cut lists of the spatial ops and back, remembered for each mesh."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from torchtp.dtensor.upstream import (
    DeviceMesh,
    DTensor,
    DTensorSpec,
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    local_of,
    make_dtensor,
    make_spec,
    plain_shard,
    real_mesh,
    redistributed,
    spec_of,
)

Placements = tuple[Placement, ...]


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
    writes_into_plain: bool = False  # whether a DTensor was ever written into a plain tensor whose gradient is recorded
    cuts: dict[tuple[Placements, torch.Size], Cut | None] = field(default_factory=dict)
    specs: dict[tuple[object, ...], DTensorSpec] = field(default_factory=dict)


_ATTRIBUTE = "_torchtp_axes"
_spatial: dict[int, set[int]] = {}


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
    return axes


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


def on_mesh(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """A gradient as a DTensor; what every rank holds where it is plain, as autograd's own zeros are.

    It makes them where a formula does not depend on an argument, and knows nothing of a DTensor but its shape.
    """
    return tensor if isinstance(tensor, DTensor) else wrap(tensor, mesh, (Replicate(),) * mesh.ndim, tensor.shape)


def wrap(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Placements,
    shape: torch.Size,
    stride: tuple[int, ...] | None = None,
) -> DTensor:
    """A DTensor of global `shape`; its global stride is dense, the same on all ranks, and has the order of the local one.

    A view's is given: by it `contiguous()` and `reshape()` know that they have to copy, so that writes into the copy do not
    reach the whole.
    """
    specs = axes_of(mesh).specs
    key = (placements, shape, local.dtype, local.stride(), stride)
    spec = specs.get(key)
    if spec is None:
        if len(specs) > 4096:
            specs.clear()
        stride = stride or whole_stride(mesh, placements, shape, local.stride())
        spec = specs[key] = make_spec(mesh, placements, shape, stride, local.dtype)
    return make_dtensor(local, spec)


def whole_stride(
    mesh: DeviceMesh, placements: Placements, shape: torch.Size, local: tuple[int, ...]
) -> tuple[int, ...]:
    """Strides of a dense tensor whose dims lie in the order of the `local` strides, if all ranks' tell the same one."""
    return dense_stride(shape, local if _all_tell_order(axes_of(mesh).sizes, placements, shape) else None)


def _all_tell_order(sizes: tuple[int, ...], placements: Placements, shape: torch.Size) -> bool:
    """Whether each rank holds at least two rows of every cut dim: the strides of fewer say nothing of the order in memory.

    Derivatives go by strides (of a product: which factor is transposed), and have to take the same way on all ranks.
    """
    extents: dict[int, set[int]] = {}
    for size, placement in zip(sizes, placements, strict=True):
        if plain_shard(placement):
            whole = extents.get(placement.dim, {shape[placement.dim]})
            bounds = [owned(extent, size, rank) for extent in whole for rank in range(size)]
            extents[placement.dim] = {end - begin for begin, end in bounds}
    return all(min(parts) > 1 for parts in extents.values())


def dense_stride(shape: torch.Size, like: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """Strides of a dense tensor of `shape` whose dims lie in memory in the order of strides `like`, by default in theirs."""
    stride = [1] * len(shape)
    step = 1
    for dim in sorted(range(len(shape)), key=lambda dim: (like[dim] if like else 0, -dim)):
        stride[dim] = step
        step *= max(1, shape[dim])
    return tuple(stride)


def sums_done(placements: Placements) -> Placements:
    """The placements with what is still to be summed whole."""
    return tuple(Replicate() if isinstance(placement, Partial) else placement for placement in placements)


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


def parameter_gradient(
    share: torch.Tensor, parameter: torch.Tensor, mesh: DeviceMesh, placements: Placements
) -> torch.Tensor:
    """What is handed out as the gradient of a parameter of an op on an activation with `placements`.

    For a plain parameter the mean rule: the share multiplied by the number of shards, so that the gradient is the mean
    over all ranks. For a DTensor parameter a DTensor that is Partial where the activation is cut.
    """
    if isinstance(parameter, DTensor):
        return wrap(share, mesh, partial_over_shards(placements), share.shape)
    shards = num_shards(mesh, placements)
    return share.mul_(shards) if shards > 1 else share
