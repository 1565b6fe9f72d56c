"""Which mesh axes are spatial, and bringing a tensor to placements a rule can work with."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from torchtp.dtensor import notice
from torchtp.dtensor.cut import Placements, axes_of
from torchtp.dtensor.moving import recut
from torchtp.dtensor.nesting import flat_recorded
from torchtp.dtensor.upstream import (
    DeviceMesh,
    DTensor,
    Op,
    Partial,
    Placement,
    Replicate,
    Shard,
    local_of,
    plain_shard,
    spec_of,
)

_on_first_mark: list[Callable[[], None]] = []


def mark(mesh: DeviceMesh, axes: Iterable[int]) -> None:
    """From now on these axes of the mesh cut images: whatever is cut over them is a cut activation."""
    spatial = axes_of(mesh).spatial
    if not spatial.issuperset(axes):
        spatial.update(axes)
        while _on_first_mark:
            _on_first_mark.pop()()


def on_first_mark(callback: Callable[[], None]) -> None:
    """Have `callback` called once, when the first axis of any mesh is marked."""
    _on_first_mark.append(callback)


def is_marked(mesh: DeviceMesh) -> bool:
    """Whether some axis of the mesh cuts images."""
    return bool(axes_of(mesh).spatial)


def is_spatial(tensor: object) -> bool:
    """Whether the tensor is cut over an axis that cuts images."""
    if not isinstance(tensor, DTensor):
        return False
    spec = spec_of(tensor)
    spatial = axes_of(spec.mesh).spatial
    return bool(spatial) and any(
        axis in spatial and (plain_shard(placement) or not isinstance(placement, (Replicate, Partial)))
        for axis, placement in enumerate(spec.placements)
    )


def local_part(
    op: Op, tensor: DTensor, may_cut: Callable[[int], bool], nested: bool = False
) -> tuple[torch.Tensor, Placements]:
    """As `arrange`, for code above autograd: differentiable. Local part and placements."""
    if not nested:
        tensor = flat_recorded(op, tensor)
    kept = tuple(place if type(place) is Shard and may_cut(place.dim) else Replicate() for place in tensor.placements)
    if any(isinstance(old, Shard) and old != new for old, new in zip(tensor.placements, kept, strict=True)):
        notice.gathering(op, tensor.shape, tensor.dtype)
    return tensor.redistribute(placements=kept).to_local(grad_placements=kept), kept


def is_replicated(tensor: torch.Tensor) -> bool:
    """Whether every rank holds the values of all of it, a plain tensor or not."""
    return not isinstance(tensor, DTensor) or all(isinstance(p, Replicate) for p in spec_of(tensor).placements)


def is_whole(tensor: DTensor) -> bool:
    """Whether every rank of a mesh that cuts images holds the tensor's full shape: its values, or a share of their sum."""
    spec = spec_of(tensor)
    return is_marked(spec.mesh) and all(isinstance(placement, (Replicate, Partial)) for placement in spec.placements)


def _is_arranged(placements: Placements, may_cut: Callable[[int], bool], nested: bool) -> bool:
    """Whether it is as `arrange` would have it."""
    seen = []
    for placement in placements:
        if plain_shard(placement):
            if not may_cut(placement.dim) or (placement.dim in seen and not nested):
                return False
            seen.append(placement.dim)
        elif type(placement) is not Replicate:
            return False
    return True


def arrange(
    op: Op, tensor: DTensor, may_cut: Callable[[int], bool], nested: bool = False
) -> tuple[torch.Tensor, DeviceMesh, Placements]:
    """The tensor with at most one cut over each dim that `may_cut` (unless `nested`), sums done. An axis that cuts another
    dim cuts the longest of these instead, if it has enough rows; otherwise the tensor is gathered over it, with notice.

    Returns its local part, mesh and placements.
    """
    spec = spec_of(tensor)
    if _is_arranged(spec.placements, may_cut, nested):
        return local_of(tensor), spec.mesh, spec.placements
    sizes = axes_of(spec.mesh).sizes
    held = {p.dim for p in spec.placements if plain_shard(p)}
    seen: set[int] = set()
    placements: list[Placement] = []
    for axis, placement in enumerate(spec.placements):
        if isinstance(placement, (Replicate, Partial)):
            placements.append(Replicate())
            continue
        if plain_shard(placement) and may_cut(placement.dim) and (nested or placement.dim not in seen):
            seen.add(placement.dim)
            placements.append(placement)
            continue
        free = [dim for dim in range(tensor.dim()) if may_cut(dim) and dim not in held]
        other = max(reversed(free), key=tensor.size, default=None)  # the last one of several
        if (
            plain_shard(placement)
            and placement.dim not in seen
            and other is not None
            and tensor.size(other) >= sizes[axis]
        ):
            held.add(other)
            placements.append(Shard(other))
        else:
            notice.gathering(op, tensor.shape, tensor.dtype)
            placements.append(Replicate())
    wanted = tuple(placements)
    return recut(local_of(tensor), spec, wanted), spec.mesh, wanted
