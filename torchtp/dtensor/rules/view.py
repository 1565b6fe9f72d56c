"""Views of cut DTensors: dims split and merged; the cut stays, moved to the new chunks where these are others."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch

from torchtp.dtensor.cut import axes_cutting, axes_of, dim_of, sums_done
from torchtp.dtensor.moving import only_row, pulled, pushed, put_into, recut, same_chunks, scaled
from torchtp.dtensor.nesting import flat, may_nest, takes_nested
from torchtp.dtensor.parts import linked
from torchtp.dtensor.registry import rule, spatial_rule
from torchtp.dtensor.routing import merged, split
from torchtp.dtensor.rules.fallback import fallback, has_strided_shard, unruled
from torchtp.dtensor.rules.shape import axis_cutting, summed
from torchtp.dtensor.spatial import is_spatial, is_whole
from torchtp.dtensor.upstream import (
    DTensor,
    Op,
    Placement,
    Replicate,
    Shard,
    become,
    local_of,
    nested_dims,
    plain_shard,
    spec_of,
)
from torchtp.dtensor.wrapping import dense_stride, in_order, same_order, wrap, wrap_in_format

aten = torch.ops.aten


@rule("unsqueeze_", "squeeze_", "transpose_", "t_")
@takes_nested
def reshape_in_place(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Upstream has none; double backward of the norms and recurrent layers call them."""
    name, overload = op._schema.name[6:-1], op._overloadname
    view_op = getattr(getattr(aten, name), "int" if name == "transpose" else overload)
    return become(op, args, kwargs, view_op(*args, **kwargs))


def groups_of(old: list[int], new: list[int]) -> list[tuple[list[int], list[int]]]:
    """The smallest groups of consecutive dims, old and new, that hold the same elements; no dim is 0."""
    groups = []
    i = j = 0
    while i < len(old) or j < len(new):
        mine, theirs = [], []
        a = b = 1
        if i < len(old):
            mine.append(i)
            a *= old[i]
            i += 1
        if j < len(new):
            theirs.append(j)
            b *= new[j]
            j += 1
        while a != b:
            if a < b:
                mine.append(i)
                a *= old[i]
                i += 1
            else:
                theirs.append(j)
                b *= new[j]
                j += 1
        groups.append((mine, theirs))
    return groups


def _inferred(sizes: list[int], numel: int) -> list[int]:
    if -1 not in sizes:
        return list(sizes)
    known = -math.prod(sizes)
    return [numel // known if size == -1 and known else size for size in sizes]


@spatial_rule("view", "_unsafe_view", "_reshape_alias")
@takes_nested
def view(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, sizes = args[0], args[1]
    if not is_spatial(tensor) or has_strided_shard(tensor):
        if not isinstance(tensor, DTensor) or isinstance(sizes, torch.dtype) or not is_whole(tensor):
            return unruled(op, args, kwargs)
        local = local_of(tensor).reshape(sizes)
        return wrap(local, tensor.device_mesh, tensor.placements, local.shape)
    if isinstance(sizes, torch.dtype):
        local, mesh, placements = summed(tensor)
        same = sizes.itemsize == tensor.dtype.itemsize
        return wrap(local.view(sizes), mesh, placements, tensor.shape) if same else fallback(op, args, kwargs)
    shape = torch.Size(_inferred(list(sizes), tensor.numel()))
    if shape.numel() != tensor.numel():
        raise RuntimeError(f"shape '{list(sizes)}' is invalid for input of size {tensor.numel()}")
    part, is_copy = _reshaped(tensor, shape)
    if not is_copy or op is aten._unsafe_view.default:
        return part
    return linked(tensor, part, lambda whole: _reshaped(whole, shape)[0], _put_reshaped)


def _put_reshaped(part: DTensor, whole: DTensor) -> None:
    put_into(_reshaped(part, whole.shape)[0], whole)


def _reshaped(tensor: DTensor, shape: torch.Size) -> tuple[DTensor, bool]:
    """The elements in another shape, and whether they are a copy."""
    if 0 in shape:  # nothing moves
        local, mesh, placements = summed(tensor)
        if tensor.shape == shape:
            return wrap(local.view(local.shape), mesh, placements, shape, tensor.stride()), False
        return wrap(local.new_empty(shape), mesh, (Replicate(),) * len(placements), shape), True
    groups = groups_of(list(tensor.shape), list(shape))
    atoms = _atoms(tensor.shape, groups, shape)
    if atoms not in (tensor.shape, shape):
        taken_apart, is_copy = _reshaped(tensor, atoms)
        result, is_another = _reshaped(taken_apart, shape)
        return result, is_copy or is_another
    if any(_inside(tensor, mine, theirs, shape) for mine, theirs in groups):
        return _with_outer_cuts(tensor, groups, shape)
    local, mesh, placements = summed(tensor)
    local_shape: list[int] = list(shape)
    out: list[Placement] = [p if isinstance(p, Replicate) else Replicate() for p in placements]
    settle = []
    copied = False
    for mine, theirs in groups:
        cut = [dim for dim in mine if axis_cutting(placements, dim) is not None]
        for dim in cut if not theirs else ():  # one row, of a dim that goes
            local = only_row(local, mesh, placements, dim)
            copied = True
        if not cut or not theirs:
            continue
        wide = [dim for dim in mine if tensor.size(dim) != 1] or cut[:1]
        wide_out = [dim for dim in theirs if shape[dim] != 1] or theirs[:1]
        dim = cut[0]
        if len(cut) > 1 or dim != wide[0]:
            return _scattered(tensor, mine, [shape[dim] for dim in theirs], shape)
        axis = axis_cutting(placements, dim)
        assert axis is not None
        target = wide_out[0]
        inside, inside_out = tensor.size(dim), shape[target]
        if dim in nested_dims(placements):
            nested = axes_cutting(placements, [dim])
            over = [axes_of(mesh).sizes[inner] for inner in nested]
            same = inside == inside_out and len(wide) == len(wide_out) == 1
            if not same and not (may_nest(inside, over) and may_nest(inside_out, over)):
                return _scattered(tensor, mine, [shape[dim] for dim in theirs], shape)
            out = [Shard(target) if inner in nested else place for inner, place in enumerate(out)]
        if len(wide) > 1 and len(wide_out) > 1 and inside % inside_out and inside_out % inside:
            return _scattered(tensor, mine, [shape[dim] for dim in theirs], shape)
        if inside_out < inside:  # the cut dim is split: its outermost part is cut
            factor = inside // inside_out
            if not same_chunks(mesh, axis, inside_out, factor):
                local = pulled(local, mesh, axis, dim, inside, inside_out, scaled(factor))
                copied = True
            local_shape[target] = local.size(dim) // factor
        else:  # kept, or merged with what lies inside it
            factor = inside_out // inside
            local_shape[target] = local.size(dim) * factor
            if not same_chunks(mesh, axis, inside, factor):
                settle.append((axis, target, inside, factor))
        out[axis] = Shard(target)
    viewable = _viewed(local, local_shape)
    copied = copied or viewable.data_ptr() != local.data_ptr()
    local = viewable
    for axis, target, inside, factor in settle:
        # this rank holds `factor` times its chunk of the old dim; the new dim's chunks lie elsewhere
        local = pushed(local, mesh, axis, target, inside * factor, inside, scaled(factor))
        copied = True
    stride = _stride_of_view(tensor, shape)
    if copied and stride is None:  # what was moved lies in the order of its dims
        whole = torch.empty_strided(tensor.shape, tensor.stride(), device="meta").reshape(shape)
        stride = dense_stride(shape, whole.stride())
        local = in_order(local, stride)
    return wrap(local, mesh, tuple(out), shape, stride), copied


def _copied(moved: DTensor, shape: torch.Size) -> tuple[DTensor, bool]:
    return _reshaped(moved, shape)[0], True


def _scattered(tensor: DTensor, mine: list[int], extents: list[int], shape: torch.Size) -> tuple[DTensor, bool]:
    """The same where a group's parts lie scattered in what it becomes: its dims `mine` are merged first, or one is split into these extents."""
    summed_up = wrap(*summed(tensor), tensor.shape, tensor.stride())
    moved = merged(summed_up, mine) if len(mine) > 1 else split(summed_up, mine[0], extents)
    return _copied(flat(aten.view.default, summed_up) if moved is None else moved, shape)


def _atoms(old: torch.Size, groups: list[tuple[list[int], list[int]]], new: torch.Size) -> torch.Size:
    """The dims that both shapes are made of by merging, [C, H, W] of [C * H, W] and [C, H * W]; `new` where there are none such."""
    atoms: list[int] = []
    for mine, theirs in groups:
        sizes, other = [old[dim] for dim in mine], [new[dim] for dim in theirs]
        if len(sizes) < 2 or len(other) < 2:
            atoms += sizes if len(sizes) > len(other) else other
            continue
        inner = {math.prod(side[i:]) for side in (sizes, other) for i in range(len(side) + 1)}
        steps = list(itertools.pairwise(sorted(inner)))
        if any(b % a for a, b in steps):
            return new
        atoms += [b // a for a, b in reversed(steps)]
    return torch.Size(atoms)


def _inside(tensor: DTensor, mine: list[int], theirs: list[int], shape: torch.Size) -> bool:
    """Whether a group of dims that are merged is cut elsewhere than along its outermost dim only."""
    cut = [dim for dim in mine if axis_cutting(spec_of(tensor).placements, dim) is not None]
    wide = [dim for dim in mine if tensor.size(dim) != 1]
    wide_out = [dim for dim in theirs if shape[dim] != 1]
    if not cut or len(wide) < 2 or not wide_out or cut == wide[:1]:
        return False
    outer, outer_out = tensor.size(wide[0]), shape[wide_out[0]]
    return len(wide_out) == 1 or outer % outer_out == 0 or outer_out % outer == 0


def _with_outer_cuts(
    tensor: DTensor, groups: list[tuple[list[int], list[int]]], shape: torch.Size
) -> tuple[DTensor, bool]:
    """The same of a tensor whose parts lie scattered in the merged dims: their outermost dim is cut first.

    Where several axes cut such dims all but the one with most ranks cut the images instead, if there are enough of them; if not,
    all cut the outermost dim, one inside the other; where its rows are too few for that, the merged one.
    """
    spec = spec_of(tensor)
    sizes = axes_of(spec.mesh).sizes
    placements: list[Placement] = list(sums_done(spec.placements))
    scattered: list[int] = []
    for mine, theirs in groups:
        if not _inside(tensor, mine, theirs, shape):
            continue
        over = axes_cutting(tuple(placements), mine)
        stays = max(over, key=lambda axis: sizes[axis])
        for axis in [axis for axis in over if axis != stays and 0 not in mine]:
            if Shard(0) not in placements and tensor.size(0) % sizes[axis] == 0:
                placements[axis] = Shard(0)
                over.remove(axis)
        outer = next(dim for dim in mine if tensor.size(dim) != 1)
        if len(over) == 1 or may_nest(tensor.size(outer), [sizes[axis] for axis in over]):
            for axis in over:
                placements[axis] = Shard(outer)
        else:
            scattered = scattered or mine
    wanted = tuple(placements)
    local = recut(local_of(tensor), spec, wanted)
    moved = wrap(local, spec.mesh, wanted, tensor.shape, tensor.stride())
    return _copied(merged(moved, scattered) if scattered else moved, shape)


def _stride_of_view(tensor: DTensor, shape: torch.Size) -> tuple[int, ...] | None:
    """Of a view of what is itself not dense, a slice; None where the whole can't be viewed so, or is dense."""
    if same_order(tensor.shape, tensor.stride(), dense_stride(tensor.shape, tensor.stride())):
        return None
    try:
        return torch.empty_strided(tensor.shape, tensor.stride(), device="meta").view(shape).stride()
    except RuntimeError:
        return None


def _viewed(local: torch.Tensor, shape: list[int]) -> torch.Tensor:
    return local.reshape(shape)


@spatial_rule("squeeze.dim", "squeeze.dims", "squeeze")
@takes_nested
def squeeze(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    if not is_spatial(tensor) or has_strided_shard(tensor):
        return unruled(op, args, kwargs)
    dims = args[1] if len(args) > 1 else list(range(tensor.dim()))
    dims = {dim_of(dim, tensor.dim()) for dim in ([dims] if isinstance(dims, int) else dims)}
    dims = sorted(dim for dim in dims if tensor.size(dim) == 1)
    local, mesh, placements = summed(tensor)
    if any(plain_shard(p) and p.dim in dims for p in placements):
        return fallback(op, args, kwargs)
    kept = tuple(Shard(p.dim - sum(dim < p.dim for dim in dims)) if plain_shard(p) else p for p in placements)
    shape = torch.Size([size for dim, size in enumerate(tensor.shape) if dim not in dims])
    stride = tuple(step for dim, step in enumerate(tensor.stride()) if dim not in dims)
    return wrap(aten.squeeze.dims(local, dims), mesh, kept, shape, stride)


@spatial_rule("pixel_shuffle")
def pixel_shuffle(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, factor = args
    if not is_spatial(tensor) or has_strided_shard(tensor) or _cut_before(tensor, 2):
        return unruled(op, args, kwargs)
    if factor <= 0 or tensor.size(-3) % factor**2:  # which ranks without rows would not say
        raise RuntimeError(
            f"pixel_shuffle: channels must be divisible by the square of {factor}, but there are {tensor.size(-3)}"
        )
    local, mesh, placements = summed(tensor)
    local = op(local, factor) if local.numel() else local.new_zeros(_shuffled(local.shape, factor))
    shape = _shuffled(tensor.shape, factor)
    for axis, placement in enumerate(placements):
        if plain_shard(placement) and placement.dim >= tensor.dim() - 2:
            extent = tensor.size(placement.dim)
            if not same_chunks(mesh, axis, extent, factor):
                local = pushed(local, mesh, axis, placement.dim, extent * factor, extent, scaled(factor))
    return wrap_in_format(local, mesh, placements, shape, tensor)


@spatial_rule("pixel_unshuffle")
def pixel_unshuffle(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, factor = args
    if not is_spatial(tensor) or has_strided_shard(tensor) or _cut_before(tensor, 2):
        return unruled(op, args, kwargs)
    if factor > 0 and (tensor.size(-2) % factor or tensor.size(-1) % factor):
        raise RuntimeError(
            f"pixel_unshuffle: height and width must be divisible by the factor {factor}, but they are {tensor.size(-2)} and "
            f"{tensor.size(-1)}"
        )
    local, mesh, placements = summed(tensor)
    for axis, placement in enumerate(placements):
        if plain_shard(placement) and placement.dim >= tensor.dim() - 2:
            extent = tensor.size(placement.dim)
            if not same_chunks(mesh, axis, extent // factor, factor):
                local = pulled(local, mesh, axis, placement.dim, extent, extent // factor, scaled(factor))
    channels, height, width = tensor.shape[-3:]
    *outer, c, h, w = local.shape
    local_shape = [*outer, c * factor**2, h // factor, w // factor]
    local = op(local, factor) if local.numel() else local.new_zeros(local_shape)
    shape = torch.Size([*tensor.shape[:-3], channels * factor**2, height // factor, width // factor])
    return wrap_in_format(local, mesh, placements, shape, tensor)


def _cut_before(tensor: Any, last: int) -> bool:
    """Whether the channels, the dim before the `last` ones, are cut."""
    return any(plain_shard(p) and p.dim == tensor.dim() - last - 1 for p in tensor.placements)


def _shuffled(shape: torch.Size, factor: int) -> torch.Size:
    *outer, channels, height, width = shape
    return torch.Size([*outer, channels // factor**2, height * factor, width * factor])
