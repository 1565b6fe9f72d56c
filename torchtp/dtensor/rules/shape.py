"""Concatenation, flips, pads and repeats of cut DTensors: local along whole dims, a pull along a cut one."""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import torch

from torchtp.dtensor import notice
from torchtp.dtensor.cut import Placements, axes_cutting, axes_of, cut_further, dim_of, interval, sums_done
from torchtp.dtensor.moving import gathers, mirrored, only_row, pulled, shifted
from torchtp.dtensor.nesting import takes_nested, takes_nested_if
from torchtp.dtensor.registry import bound, named_arguments, rule, spatial_rule
from torchtp.dtensor.routing import joined
from torchtp.dtensor.rules.fallback import fallback, has_strided_shard, unruled
from torchtp.dtensor.rules.pointwise import common_placements
from torchtp.dtensor.sharing import local_as
from torchtp.dtensor.spatial import is_marked, is_spatial
from torchtp.dtensor.upstream import (
    DeviceMesh,
    DTensor,
    Op,
    Replicate,
    Shard,
    local_of,
    nested_dims,
    node_in_backward,
    passthrough,
    plain_shard,
    redistributed,
    spec_of,
)
from torchtp.dtensor.wrapping import wrap, wrap_as_one_device, wrap_in_format

aten = torch.ops.aten

_FEW = 8  # rows


def axis_cutting(placements: Placements, dim: int) -> int | None:
    """The mesh axis that cuts `dim`, if one does."""
    return next(iter(axes_cutting(placements, [dim])), None)


def summed(tensor: DTensor) -> tuple[torch.Tensor, DeviceMesh, Placements]:
    """Local part, mesh and placements, sums done."""
    spec = spec_of(tensor)
    placements = sums_done(spec.placements)
    return redistributed(local_of(tensor), spec, placements), spec.mesh, placements


def is_hardly_reduced(shape: torch.Size, dims: Collection[int]) -> bool:
    """Whether what is left of a tensor that is reduced over `dims` is nearly as large, so that it had better stay cut: over few
    rows of one dim. Not of an image's dims, whose reductions are vectors."""
    if len(dims) != 1 or len(shape) < 4:
        return False
    (dim,) = dims
    return shape[dim] <= _FEW and (len(shape) > 4 or dim < 2)


def resized(shape: torch.Size, dim: int, extent: int) -> torch.Size:
    """The shape with another extent of one dim."""
    return torch.Size([*shape[:dim], extent, *shape[dim + 1 :]])


def without(placements: Placements, dim: int) -> Placements:
    """The placements after `dim`, which is whole, has been taken out."""
    return tuple(Shard(p.dim - 1) if plain_shard(p) and p.dim > dim else p for p in placements)


def uncut(placements: Placements, dim: int) -> Placements:
    """The placements with `dim` whole."""
    return tuple(Replicate() if plain_shard(p) and p.dim == dim else p for p in placements)


def taken(tensor: Any) -> bool:
    """Whether the rules take a tensor: cut, and as torch.chunk does it."""
    return is_spatial(tensor) and not has_strided_shard(tensor)


def other_dims(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], dims: set[int]) -> bool:
    """Whether an op along a dim, or some, works along none of `dims`."""
    named = named_arguments(op, args, kwargs)
    along: Any = named["dims"] if "dims" in named else named.get("dim", named.get("dimension"))
    num_dims = (args[0] if isinstance(args[0], torch.Tensor) else args[0][0]).dim()
    along = [along] if isinstance(along, int) else along
    return bool(along) and not dims & {dim % num_dims for dim in along}


@spatial_rule("cat")
@takes_nested
def cat(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors, dim = bound(op, args, kwargs)
    if any(has_strided_shard(tensor) for tensor in tensors):
        return fallback(op, args, kwargs)
    dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))  # those of nothing count, too
    tensors = [tensor for tensor in tensors if tensor.dim() > 1 or tensor.numel() > 0] or list(tensors)[:1]
    lead = max(filter(is_spatial, tensors), key=torch.numel, default=None)  # the others are cut as the largest is
    if lead is None:
        if all(isinstance(tensor, DTensor) for tensor in tensors):
            return unruled(op, args, kwargs)
        lead = next(tensor for tensor in tensors if isinstance(tensor, DTensor))
    mesh = lead.device_mesh
    dim = dim_of(dim, lead.dim())
    for number, tensor in enumerate(tensors):
        if tensor.dim() != lead.dim() or resized(tensor.shape, dim, lead.size(dim)) != lead.shape:
            raise RuntimeError(
                f"torch.cat: sizes of tensors must match except in dimension {dim}, but tensor {number} in the list has "
                f"shape {tuple(tensor.shape)} beside {tuple(lead.shape)}"
            )
    extent = sum(tensor.size(dim) for tensor in tensors)
    shape = resized(lead.shape, dim, extent)
    placements = sums_done(spec_of(lead).placements)
    locals_ = []
    for tensor in tensors:
        if isinstance(tensor, DTensor) and gathers(spec_of(tensor).placements, placements):
            notice.gathering(op, tensor.shape, tensor.dtype)
        locals_.append(local_as(tensor, mesh, placements))
    if all(tensor.dtype != dtype for tensor in tensors):
        locals_ = [local.to(dtype) for local in locals_]
    axis = axis_cutting(placements, dim)
    if axis is None:
        return wrap(aten.cat(locals_, dim), mesh, placements, shape)
    if dim in nested_dims(placements):
        local = joined(locals_, [tensor.size(dim) for tensor in tensors], mesh, placements, dim)
        return wrap_as_one_device(local, mesh, placements, shape)
    pieces, offset = [], 0
    for tensor, local in zip(tensors, locals_, strict=True):
        rows = tensor.size(dim)

        wants = shifted(-offset, low=0, high=rows)
        pieces.append(pulled(local, mesh, axis, dim, rows, extent, wants))
        offset += rows
    return wrap_as_one_device(aten.cat(pieces, dim), mesh, placements, shape)


@spatial_rule("stack")
@takes_nested
def stack(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors, dim = bound(op, args, kwargs)
    lead = next((t for t in tensors if is_spatial(t)), None)
    if lead is None and all(isinstance(tensor, DTensor) for tensor in tensors):
        return unruled(op, args, kwargs)
    mesh, placements = common_placements(op, list(tensors))
    dim = dim_of(dim, tensors[0].dim() + 1)
    for number, tensor in enumerate(tensors):
        if tensor.shape != tensors[0].shape:
            raise RuntimeError(
                f"stack expects each tensor to be equal size, but got {list(tensors[0].shape)} at entry 0 and "
                f"{list(tensor.shape)} at entry {number}"
            )
    shape = torch.Size([*tensors[0].shape[:dim], len(tensors), *tensors[0].shape[dim:]])
    wider = tuple(Shard(p.dim + 1) if plain_shard(p) and p.dim >= dim else p for p in placements)
    return wrap(aten.stack([local_as(t, mesh, placements) for t in tensors], dim), mesh, wider, shape)


@spatial_rule("flip")
@takes_nested_if(other_dims)
def flip(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, dims = bound(op, args, kwargs)
    if not taken(tensor):
        return unruled(op, args, kwargs)
    local, mesh, placements = summed(tensor)
    for dim in dims:
        dim = dim_of(dim, tensor.dim())
        axis = axis_cutting(placements, dim)
        if axis is not None:
            extent = tensor.size(dim)
            local = pulled(local, mesh, axis, dim, extent, extent, mirrored(extent))
    return wrap(aten.flip(local, dims), mesh, placements, tensor.shape)


@spatial_rule("rot90")
def rot90(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, times, dims = bound(op, args, kwargs)
    times %= 4
    if not taken(tensor) or len(dims) != 2:
        return unruled(op, args, kwargs)
    if dim_of(dims[0], tensor.dim()) == dim_of(dims[1], tensor.dim()):
        raise RuntimeError(f"rot90: the two dims of a plane differ, but they are {list(dims)}")
    if times == 0:
        return aten.clone(tensor)
    mirrored_dims = list(dims) if times == 2 else [dims[1] if times == 1 else dims[0]]
    turned = aten.flip(tensor, mirrored_dims)
    return turned if times == 2 else aten.clone(aten.transpose(turned, *dims))


@spatial_rule("roll")
@takes_nested_if(other_dims)
def roll(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, shifts, dims = bound(op, args, kwargs)
    if not taken(tensor):
        return unruled(op, args, kwargs)
    if not dims:
        return fallback(op, args, kwargs)
    local, mesh, placements = summed(tensor)
    for shift, dim in zip(shifts, dims, strict=True):
        dim = dim_of(dim, tensor.dim())
        axis, extent = axis_cutting(placements, dim), tensor.size(dim)
        if axis is None or extent == 0:
            local = aten.roll(local, [shift], [dim])
            continue
        by = shift % extent
        # output row o is input row o - by, or o - by + extent where that is negative: what is ahead, then what is behind
        ahead = pulled(local, mesh, axis, dim, extent, extent, shifted(extent - by, high=extent))
        behind = pulled(local, mesh, axis, dim, extent, extent, shifted(-by, low=0))
        local = aten.cat([ahead, behind], dim)
    return wrap_in_format(local, mesh, placements, tensor.shape, tensor)


@spatial_rule("constant_pad_nd")
def constant_pad_nd(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, pad, value = bound(op, args, kwargs)
    if not taken(tensor) or isinstance(value, complex):
        return unruled(op, args, kwargs)
    local, mesh, placements = summed(tensor)
    local_pad, shape = list(pad), tensor.shape
    for i in range(len(pad) // 2):
        dim = tensor.dim() - 1 - i
        before, after = pad[2 * i], pad[2 * i + 1]
        extent = tensor.size(dim)
        shape = resized(shape, dim, extent + before + after)
        axis = axis_cutting(placements, dim)
        if axis is None or (before, after) == (0, 0):
            continue
        local_pad[2 * i] = local_pad[2 * i + 1] = 0
        local = pulled(local, mesh, axis, dim, extent, shape[dim], shifted(-before), float(value))
    if any(local_pad):
        local = aten.constant_pad_nd(local, local_pad, value)
    return wrap(local.clone() if local is local_of(tensor) else local, mesh, placements, shape)


@spatial_rule("expand")
@takes_nested
def expand(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, sizes, *_ = bound(op, args, kwargs)
    if not isinstance(tensor, DTensor):
        return unruled(op, args, kwargs)
    if has_strided_shard(tensor):
        return passthrough(op, args, kwargs)
    more = len(sizes) - tensor.dim()
    shape = torch.Size([tensor.size(i - more) if size == -1 else size for i, size in enumerate(sizes)])
    taken_from = _summed_from(tensor, shape)
    if not is_spatial(tensor) and taken_from is None:
        return passthrough(op, args, kwargs)
    local, mesh, placements = summed(tensor)
    wider = tuple(Shard(p.dim + more) if plain_shard(p) else p for p in placements)
    for dim in {p.dim for p in placements if plain_shard(p)}:
        if tensor.size(dim) != shape[dim + more]:  # one row becomes many: every rank needs it
            local = only_row(local, mesh, placements, dim)
    if taken_from is not None:
        wider = cut_further(wider, taken_from, lambda dim: dim < more or tensor.size(dim - more) != shape[dim])
    local_shape = list(shape)
    for dim in {p.dim for p in wider if plain_shard(p)}:
        begin, end = interval(mesh, wider, dim, shape[dim])
        local_shape[dim] = end - begin
    stride = tuple(
        0 if i < more or tensor.size(i - more) != size else tensor.stride(i - more) for i, size in enumerate(shape)
    )
    return wrap(aten.expand(local, local_shape), mesh, wider, shape, stride)


_SUMS = ("SumBackward0", "SumBackward1", "MeanBackward0", "MeanBackward1")


def _summed_from(tensor: DTensor, shape: torch.Size) -> Placements | None:
    """How what was summed was cut where this is the gradient's way back: else every rank would have a whole one."""
    if node_in_backward(*_SUMS) is None:
        return None
    return axes_of(tensor.device_mesh).taken_from.of(shape)


@spatial_rule("repeat")
@takes_nested
def repeat(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, repeats = bound(op, args, kwargs)
    if not taken(tensor):
        return unruled(op, args, kwargs)
    more = len(repeats) - tensor.dim()
    if more < 0:
        raise RuntimeError("Number of dimensions of repeat dims can not be smaller than number of dimensions of tensor")
    repeats = list(repeats)
    for dim in {p.dim for p in spec_of(tensor).placements if plain_shard(p) and repeats[p.dim + more] > 1}:
        tensor = cat(aten.cat.default, ([tensor] * repeats[dim + more], dim), {})
        repeats[dim + more] = 1
    local, mesh, placements = summed(tensor)
    if any(plain_shard(p) and repeats[p.dim + more] != 1 for p in placements):
        return fallback(op, args, kwargs)
    wider = tuple(Shard(p.dim + more) if plain_shard(p) else p for p in placements)
    shape = torch.Size([r * s for r, s in zip(repeats, [1] * more + list(tensor.shape), strict=True)])
    return wrap(aten.repeat(local, repeats), mesh, wider, shape)


@rule("as_strided", "as_strided_")
def as_strided(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """AdaptiveAvgPool2d(1) restrides its [N, C, 1, 1] result to channels_last: the elements stay where they are."""
    tensor, size, stride, offset = bound(op, args, kwargs)
    stays = tuple(tensor.shape) == tuple(size) and all(
        old == new for old, new, extent in zip(tensor.stride(), stride, size, strict=True) if extent > 1
    )
    if stays and not offset:
        return tensor if op._schema.name.endswith("_") else aten.alias(tensor)
    local = local_of(tensor)
    if is_spatial(tensor) or not is_marked(tensor.device_mesh):
        return unruled(op, args, kwargs)
    lies_so = all(
        a == b for a, b, extent in zip(local.stride(), tensor.stride(), tensor.shape, strict=True) if extent > 1
    )
    if not lies_so:
        raise NotImplementedError(
            f"{op}: strides count places in memory, and those of this tensor are {local.stride()}, not "
            f"{tensor.stride()} as it says; take `tensor.clone(memory_format=torch.contiguous_format)` first"
        )
    # Places in memory: the local tensor may lie in the middle of another one.
    start = local.storage_offset() + (0 if offset is None else offset - tensor.storage_offset())
    return unruled(op, (tensor, size, stride, start), {})
