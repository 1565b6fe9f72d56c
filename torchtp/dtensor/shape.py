"""Slices, splits, concatenation, flips and pads of cut DTensors: local along whole dims, a pull along a cut one."""

from __future__ import annotations

from typing import Any

import torch

from torchtp.dtensor import notice
from torchtp.dtensor.cut import Placements, local_as, wrap
from torchtp.dtensor.fallback import fallback, has_strided_shard, unruled
from torchtp.dtensor.moving import everywhere, mirrored, pulled, pushed, shifted
from torchtp.dtensor.pointwise import common_placements
from torchtp.dtensor.registry import bound, rule, spatial_rule
from torchtp.dtensor.spatial import is_spatial
from torchtp.dtensor.upstream import (
    DeviceMesh,
    DTensor,
    Op,
    Partial,
    Replicate,
    Shard,
    local_of,
    plain_shard,
    redistributed,
    spec_of,
)

aten = torch.ops.aten


def axis_cutting(placements: Placements, dim: int) -> int | None:
    """The mesh axis that cuts `dim`, if one does."""
    for axis, placement in enumerate(placements):
        if plain_shard(placement) and placement.dim == dim:
            return axis
    return None


def summed(tensor: DTensor) -> tuple[torch.Tensor, DeviceMesh, Placements]:
    """Local part, mesh and placements, sums done."""
    spec = spec_of(tensor)
    placements = tuple(Replicate() if isinstance(p, Partial) else p for p in spec.placements)
    return redistributed(local_of(tensor), spec, placements), spec.mesh, placements


def resized(shape: torch.Size, dim: int, extent: int) -> torch.Size:
    """The shape with another extent of one dim."""
    return torch.Size([*shape[:dim], extent, *shape[dim + 1 :]])


def without(placements: Placements, dim: int) -> Placements:
    """The placements after `dim`, which is whole, has been taken out."""
    return tuple(Shard(p.dim - 1) if plain_shard(p) and p.dim > dim else p for p in placements)


def uncut(placements: Placements, dim: int) -> Placements:
    """The placements with `dim` whole."""
    return tuple(Replicate() if plain_shard(p) and p.dim == dim else p for p in placements)


def copy_marked(tensor: DTensor) -> DTensor:
    """Marks a result that PyTorch calls a view and that is a copy here: writing into it would be lost."""
    tensor._torchtp_copy = True  # type: ignore[attr-defined]
    return tensor


def slice_rows(tensor: DTensor, dim: int, begin: int, end: int, step: int = 1) -> DTensor:
    """Rows [begin, end) of a dim, every `step`-th; cut again where the dim is cut."""
    local, mesh, placements = summed(tensor)
    extent = max(0, -(-(end - begin) // step))
    shape = resized(tensor.shape, dim, extent)
    axis = axis_cutting(placements, dim)
    if axis is None:
        return wrap(aten.slice(local, dim, begin, max(begin, end), step), mesh, placements, shape)
    if (begin, end, step) == (0, tensor.size(dim), 1):
        return wrap(aten.alias(local), mesh, placements, shape)
    rows = pulled(
        local,
        mesh,
        axis,
        dim,
        tensor.size(dim),
        extent,
        lambda o0, o1: (begin + o0 * step, begin + (o1 - 1) * step + 1),
    )
    return copy_marked(wrap(rows if step == 1 else aten.slice(rows, dim, 0, None, step), mesh, placements, shape))


def _clamped(index: int | None, extent: int, default: int) -> int:
    if index is None:
        return default
    return min(extent, max(0, index + extent if index < 0 else index))


def _taken(tensor: Any) -> bool:
    return is_spatial(tensor) and not has_strided_shard(tensor)


@spatial_rule("slice.Tensor")
def slice(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, dim, start, end, step = bound(op, args, kwargs)
    if not _taken(tensor):
        return unruled(op, args, kwargs)
    dim %= tensor.dim()
    extent = tensor.size(dim)
    return slice_rows(tensor, dim, _clamped(start, extent, 0), _clamped(end, extent, extent), step)


@spatial_rule("slice_backward")
def slice_backward(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grad, sizes, dim, start, end, step = bound(op, args, kwargs)
    if not _taken(grad):
        return unruled(op, args, kwargs)
    local, mesh, placements = summed(grad)
    dim %= len(sizes)
    extent, out_extent = sizes[dim], grad.size(dim)
    begin = _clamped(start, extent, 0)
    axis = axis_cutting(placements, dim)
    shape = torch.Size(sizes)
    if axis is None:
        local_sizes = list(local.shape)
        local_sizes[dim] = extent
        return wrap(op(local, local_sizes, dim, start, end, step), mesh, placements, shape)
    if step != 1:
        rows = local.new_zeros(resized(local.shape, dim, max(0, (local.size(dim) - 1) * step + 1)))
        aten.slice(rows, dim, 0, None, step).copy_(local)
        local = rows
    grad_input = pushed(
        local, mesh, axis, dim, extent, out_extent, lambda o0, o1: (begin + o0 * step, begin + (o1 - 1) * step + 1)
    )
    return wrap(grad_input, mesh, placements, shape)


@spatial_rule("select.int")
def select(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, dim, index = bound(op, args, kwargs)
    if not _taken(tensor):
        return unruled(op, args, kwargs)
    local, mesh, placements = summed(tensor)
    dim %= tensor.dim()
    shape = torch.Size([*tensor.shape[:dim], *tensor.shape[dim + 1 :]])
    axis = axis_cutting(placements, dim)
    if axis is None:
        return wrap(aten.select(local, dim, index), mesh, without(placements, dim), shape)
    index %= tensor.size(dim)
    row = everywhere(local, mesh, axis, dim, tensor.size(dim), index, index + 1)
    return copy_marked(wrap(row.squeeze(dim), mesh, without(uncut(placements, dim), dim), shape))


@spatial_rule("select_backward")
def select_backward(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grad, sizes, dim, index = bound(op, args, kwargs)
    if not isinstance(grad, DTensor):
        return unruled(op, args, kwargs)
    local, mesh, placements = summed(grad)
    dim %= len(sizes)
    wider = tuple(Shard(p.dim + 1) if plain_shard(p) and p.dim >= dim else p for p in placements)
    local_sizes = [*local.shape[:dim], sizes[dim], *local.shape[dim:]]
    return wrap(op(local, local_sizes, dim, index % sizes[dim]), mesh, wider, torch.Size(sizes))


@spatial_rule("split.Tensor", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes")
def split(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, sizes, dim = bound(op, args, kwargs)
    if not _taken(tensor):
        return unruled(op, args, kwargs)
    dim %= tensor.dim()
    extent = tensor.size(dim)
    if isinstance(sizes, int):
        sizes = [min(sizes, extent - begin) for begin in range(0, extent, sizes)] if extent else [0]
    pieces, begin = [], 0
    for size in sizes:
        pieces.append(slice_rows(tensor, dim, begin, begin + size))
        begin += size
    return pieces


@spatial_rule("unbind")
def unbind(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, dim = bound(op, args, kwargs)
    if not _taken(tensor):
        return unruled(op, args, kwargs)
    return [select(aten.select.int, (tensor, dim, index), {}) for index in range(tensor.size(dim))]


@spatial_rule("cat")
def cat(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors, dim = bound(op, args, kwargs)
    if any(has_strided_shard(tensor) for tensor in tensors):
        return fallback(op, args, kwargs)
    tensors = [tensor for tensor in tensors if tensor.dim() > 1 or tensor.numel() > 0] or list(tensors)[:1]
    lead = next((t for t in tensors if is_spatial(t)), None)
    if lead is None:
        if all(isinstance(tensor, DTensor) for tensor in tensors):
            return unruled(op, args, kwargs)
        lead = next(tensor for tensor in tensors if isinstance(tensor, DTensor))
    mesh = lead.device_mesh
    dim %= lead.dim()
    extent = sum(tensor.size(dim) for tensor in tensors)
    shape = resized(lead.shape, dim, extent)
    placements = tuple(Replicate() if isinstance(p, Partial) else p for p in spec_of(lead).placements)
    locals_ = []
    for tensor in tensors:
        if isinstance(tensor, DTensor) and is_spatial(tensor) and spec_of(tensor).placements != placements:
            notice.gathering(op, tensor.shape, tensor.dtype)
        locals_.append(local_as(tensor, mesh, placements))
    axis = axis_cutting(placements, dim)
    if axis is None:
        return wrap(aten.cat(locals_, dim), mesh, placements, shape)
    pieces, offset = [], 0
    for tensor, local in zip(tensors, locals_, strict=True):
        rows = tensor.size(dim)

        wants = shifted(-offset, low=0, high=rows)
        pieces.append(pulled(local, mesh, axis, dim, rows, extent, wants))
        offset += rows
    return wrap(aten.cat(pieces, dim), mesh, placements, shape)


@spatial_rule("stack")
def stack(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors, dim = bound(op, args, kwargs)
    lead = next((t for t in tensors if is_spatial(t)), None)
    if lead is None and all(isinstance(tensor, DTensor) for tensor in tensors):
        return unruled(op, args, kwargs)
    mesh, placements = common_placements(op, list(tensors))
    dim %= tensors[0].dim() + 1
    shape = torch.Size([*tensors[0].shape[:dim], len(tensors), *tensors[0].shape[dim:]])
    wider = tuple(Shard(p.dim + 1) if plain_shard(p) and p.dim >= dim else p for p in placements)
    return wrap(aten.stack([local_as(t, mesh, placements) for t in tensors], dim), mesh, wider, shape)


@spatial_rule("flip")
def flip(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, dims = bound(op, args, kwargs)
    if not _taken(tensor):
        return unruled(op, args, kwargs)
    local, mesh, placements = summed(tensor)
    for dim in dims:
        dim %= tensor.dim()
        axis = axis_cutting(placements, dim)
        if axis is not None:
            extent = tensor.size(dim)
            local = pulled(local, mesh, axis, dim, extent, extent, mirrored(extent))
    return wrap(aten.flip(local, dims), mesh, placements, tensor.shape)


@spatial_rule("roll")
def roll(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, shifts, dims = bound(op, args, kwargs)
    if not _taken(tensor):
        return unruled(op, args, kwargs)
    if not dims:
        return fallback(op, args, kwargs)
    local, mesh, placements = summed(tensor)
    for shift, dim in zip(shifts, dims, strict=True):
        dim %= tensor.dim()
        axis, extent = axis_cutting(placements, dim), tensor.size(dim)
        if axis is None or extent == 0:
            local = aten.roll(local, [shift], [dim])
            continue
        by = shift % extent
        # output row o is input row o - by, or o - by + extent where that is negative: what is ahead, then what is behind
        ahead = pulled(local, mesh, axis, dim, extent, extent, shifted(extent - by, high=extent))
        behind = pulled(local, mesh, axis, dim, extent, extent, shifted(-by, low=0))
        local = aten.cat([ahead, behind], dim)
    return wrap(local, mesh, placements, tensor.shape)


@spatial_rule("constant_pad_nd")
def constant_pad_nd(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, pad, value = bound(op, args, kwargs)
    if not _taken(tensor):
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


@spatial_rule("repeat")
def repeat(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, repeats = bound(op, args, kwargs)
    if not _taken(tensor):
        return unruled(op, args, kwargs)
    local, mesh, placements = summed(tensor)
    more = len(repeats) - tensor.dim()
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
    return unruled(op, args, kwargs)
