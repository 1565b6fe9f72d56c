"""Ops that need nothing of other ranks where the dim they work along, or the table they look in, is whole."""

from __future__ import annotations

from typing import Any

import torch

from torchtp.dtensor.nesting import takes_nested
from torchtp.dtensor.parts import linked
from torchtp.dtensor.registry import bound, spatial_rule
from torchtp.dtensor.rules.fallback import is_of_summands, unruled
from torchtp.dtensor.rules.pointwise import common_placements, pointwise
from torchtp.dtensor.rules.shape import axis_cutting, summed, taken
from torchtp.dtensor.sharing import local_as
from torchtp.dtensor.spatial import is_marked, is_spatial
from torchtp.dtensor.upstream import DTensor, Op, Partial, Replicate, local_of, plain_shard, spec_of
from torchtp.dtensor.wrapping import wrap


@spatial_rule("channel_shuffle", "native_channel_shuffle")
def channel_shuffle(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, groups = bound(op, args, kwargs)
    fits = groups > 0 and tensor.size(1) % groups == 0  # else refused by all ranks, also where a part is empty
    if not taken(tensor) or not fits or any(plain_shard(p) and p.dim == 1 for p in tensor.placements):
        return unruled(op, args, kwargs)
    local, mesh, placements = summed(tensor)
    shuffled = op(local, groups) if local.numel() else local.clone()
    return wrap(shuffled, mesh, placements, tensor.shape)


@spatial_rule("linalg_cross")
def linalg_cross(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    one, other, dim = bound(op, args, kwargs)
    if not (taken(one) or taken(other)) or one.dim() != other.dim():
        return unruled(op, args, kwargs)
    _, placements = common_placements(op, [one, other], torch.broadcast_shapes(one.shape, other.shape))
    if axis_cutting(placements, dim % one.dim()) is not None:
        return unruled(op, args, kwargs)
    return pointwise(op, args, kwargs)


@spatial_rule("view_as_real", "view_as_complex")
@takes_nested
def view_as_other(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    (tensor,) = args
    last = tensor.dim() - 1 if tensor.is_floating_point() else tensor.dim()
    if not taken(tensor) or any(plain_shard(p) and p.dim == last for p in tensor.placements):
        return unruled(op, args, kwargs)
    local, mesh, placements = summed(tensor)
    if tensor.is_complex():
        shape, stride = (*tensor.shape, 2), (*(2 * step for step in tensor.stride()), 1)
    else:
        shape, stride = tuple(tensor.shape[:-1]), tuple(step // 2 for step in tensor.stride()[:-1])
    return wrap(op(local), mesh, placements, torch.Size(shape), stride)


@spatial_rule("_conj")
@takes_nested
def conjugate(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A copy, where PyTorch gives a view: local parts that are marked as conjugated are refused by some ops."""
    (tensor,) = args
    if not is_marked(tensor.device_mesh):
        return unruled(op, args, kwargs)

    def take(whole: DTensor) -> DTensor:
        spec = spec_of(whole)
        local, mesh, placements = local_of(whole), spec.mesh, spec.placements
        if any(isinstance(p, Partial) and not is_of_summands(p) for p in placements):
            local, mesh, placements = summed(whole)
        return wrap(local.conj_physical(), mesh, placements, whole.shape, whole.stride())

    def put(part: DTensor, whole: DTensor) -> None:
        local_of(whole).copy_(local_of(part).conj_physical())

    part = take(tensor)
    linked(tensor, part, take, put)
    return part


@spatial_rule("bucketize.Tensor", "searchsorted.Tensor", "isin.Tensor_Tensor")
def looked_up(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    searches = op._schema.name == "aten::searchsorted"
    tensor, table = (args[1], args[0]) if searches else (args[0], args[1])
    several = table.dim() != 1 and op._schema.name != "aten::isin"  # a table for each row
    if not taken(tensor) or is_spatial(table) or several or isinstance(kwargs.get("sorter"), DTensor):
        return unruled(op, args, kwargs)
    local, mesh, placements = summed(tensor)
    whole = local_as(table, mesh, (Replicate(),) * mesh.ndim)
    found = op(*((whole, local) if searches else (local, whole)), **kwargs)
    return wrap(found, mesh, placements, tensor.shape)
