"""Tensors made after a cut one, as a cost volume or a canvas is: cut like it where their last dims have its extents or greater ones."""

from __future__ import annotations

from typing import Any

import torch

from torchtp.dtensor.cut import Placements, axes_of, interval, sums_done
from torchtp.dtensor.moving import chunk_of
from torchtp.dtensor.nesting import takes_nested
from torchtp.dtensor.registry import spatial_rule
from torchtp.dtensor.rules.fallback import has_strided_shard
from torchtp.dtensor.spatial import is_spatial
from torchtp.dtensor.upstream import (
    DTensor,
    Op,
    Partial,
    Placement,
    Replicate,
    Shard,
    in_backward,
    local_of,
    node_in_backward,
    passthrough,
    plain_shard,
    spec_of,
)
from torchtp.dtensor.wrapping import dense_stride, wrap


@spatial_rule("new_zeros", "new_ones", "new_full", "new_empty")
@takes_nested
def new(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, sizes, *others = args
    picked_from = _picked_from(tensor, torch.Size(sizes))
    if picked_from is not None:
        edges = [interval(tensor.device_mesh, picked_from, dim, extent) for dim, extent in enumerate(sizes)]
        local = op(local_of(tensor), [end - begin for begin, end in edges], *others, **kwargs)
        return wrap(local, tensor.device_mesh, picked_from, torch.Size(sizes))
    if not is_spatial(tensor) or has_strided_shard(tensor) or len(sizes) < tensor.dim():
        return passthrough(op, args, kwargs)
    spec, shape = spec_of(tensor), torch.Size(sizes)
    more = len(sizes) - tensor.dim()
    placements: list[Placement] = []
    local_shape = list(shape)
    for axis, placement in enumerate(spec.placements):
        if not plain_shard(placement):
            placements.append(Replicate() if isinstance(placement, Partial) else placement)
        elif shape[placement.dim + more] < tensor.size(placement.dim) and not in_backward():
            # Greater is what images are padded in; less may be anything. In a backward it is for what the tensor was made a
            # part of (rfft, gather), and cut as that was.
            placements.append(Replicate())
        else:
            dim = placement.dim + more
            placements.append(Shard(dim))
            begin, end = chunk_of(spec.mesh, axis, local_shape[dim])
            local_shape[dim] = end - begin
    return wrap(op(local_of(tensor), local_shape, *others, **kwargs), spec.mesh, tuple(placements), shape)


def _picked_from(tensor: Any, shape: torch.Size) -> Placements | None:
    """How the cut tensor was cut that points were picked from, if this is for its gradient."""
    if not isinstance(tensor, DTensor) or node_in_backward("IndexBackward0") is None:
        return None
    return axes_of(tensor.device_mesh).picked_from.of(shape)


@spatial_rule("new_empty_strided")
@takes_nested
def new_strided(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Autograd makes one for every write into a part of a tensor; upstream's is whole where the cut is uneven."""
    tensor, sizes, stride = args[:3]
    if not is_spatial(tensor) or has_strided_shard(tensor) or tuple(sizes) != tuple(tensor.shape):
        return passthrough(op, args, kwargs)
    spec, local = spec_of(tensor), local_of(tensor)
    placements = sums_done(spec.placements)
    made = op(local, local.shape, dense_stride(local.shape, tuple(stride)), **kwargs)
    return wrap(made, spec.mesh, placements, tensor.shape)
