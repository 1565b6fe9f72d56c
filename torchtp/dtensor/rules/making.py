"""Tensors made after a cut one, as a cost volume or a canvas is: cut like it where their last dims have its extents or greater ones."""

from __future__ import annotations

from typing import Any

import torch

from torchtp.dtensor.cut import axes_of, interval, sums_done
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
    if _takes_points_back(tensor, sizes):
        return _as_picked_from(op, tensor, torch.Size(sizes), others, kwargs)
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


def _takes_points_back(tensor: Any, sizes: Any) -> bool:
    """Whether it is for the gradient of a cut tensor that points were picked from."""
    known = isinstance(tensor, DTensor) and torch.Size(sizes) in axes_of(tensor.device_mesh).picked_from
    return known and in_backward() and node_in_backward("IndexBackward0") is not None


def _as_picked_from(op: Op, tensor: DTensor, shape: torch.Size, others: list[Any], kwargs: dict[str, Any]) -> DTensor:
    mesh = tensor.device_mesh
    placements = axes_of(mesh).picked_from[shape]
    edges = [interval(mesh, placements, dim, extent) for dim, extent in enumerate(shape)]
    local = op(local_of(tensor), [end - begin for begin, end in edges], *others, **kwargs)
    return wrap(local, mesh, placements, shape)


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
