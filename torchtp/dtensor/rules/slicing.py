"""Slices, rows and splits of cut DTensors: views along whole dims; along a cut one a pull, whose result is a linked copy."""

from __future__ import annotations

from typing import Any

import torch

from torchtp.dtensor.cut import axes_of, cut_further, dim_of, interval, note_taken
from torchtp.dtensor.moving import Wants, chunk_of, everywhere, only_row, pulled, pushed, recut
from torchtp.dtensor.nesting import takes_nested, takes_nested_if
from torchtp.dtensor.parts import linked
from torchtp.dtensor.registry import bound, spatial_rule
from torchtp.dtensor.routing import picked, put
from torchtp.dtensor.rules.along import Turn
from torchtp.dtensor.rules.fallback import unruled, view_links
from torchtp.dtensor.rules.shape import axis_cutting, other_dims, resized, summed, taken, uncut, without
from torchtp.dtensor.spatial import is_spatial
from torchtp.dtensor.upstream import (
    DTensor,
    Op,
    Shard,
    in_backward,
    local_of,
    nested_dims,
    plain_shard,
    redistributed,
    spec_of,
)
from torchtp.dtensor.wrapping import wrap

aten = torch.ops.aten


def slice_rows(tensor: DTensor, dim: int, begin: int, end: int, step: int = 1) -> DTensor:
    """Rows [begin, end) of a dim, every `step`-th; cut again where the dim is cut."""
    part, is_copy = _sliced(tensor, dim, begin, end, step)
    if not is_copy:
        return part
    return linked(
        tensor,
        part,
        lambda whole: _sliced(whole, dim, begin, end, step)[0],
        lambda rows, whole: _put_rows(rows, whole, dim, begin, step),
    )


def _sliced(tensor: DTensor, dim: int, begin: int, end: int, step: int) -> tuple[DTensor, bool]:
    """The rows, and whether they are a copy."""
    local, mesh, placements = summed(tensor)
    extent = max(0, -(-(end - begin) // step))
    shape, stride = resized(tensor.shape, dim, extent), tensor.stride()
    stride = (*stride[:dim], stride[dim] * step, *stride[dim + 1 :])
    axis = axis_cutting(placements, dim)
    if axis is None:
        return wrap(aten.slice(local, dim, begin, max(begin, end), step), mesh, placements, shape, stride), False
    if (begin, end, step) == (0, tensor.size(dim), 1):
        return wrap(aten.alias(local), mesh, placements, shape, stride), False
    if dim in nested_dims(placements):
        return picked(wrap(local, mesh, placements, tensor.shape), dim, range(begin, max(begin, end), step)), True
    rows = pulled(
        local,
        mesh,
        axis,
        dim,
        tensor.size(dim),
        extent,
        lambda o0, o1: (begin + o0 * step, begin + (o1 - 1) * step + 1),
    )
    return wrap(rows if step == 1 else aten.slice(rows, dim, 0, None, step), mesh, placements, shape, stride), True


def _put_rows(rows: DTensor, whole: DTensor, dim: int, begin: int, step: int) -> None:
    """Writes `rows`, which are every `step`-th of the whole's from `begin` on, into the whole."""
    spec = spec_of(whole)
    mesh, extent, count = spec.mesh, whole.size(dim), rows.size(dim)
    axis = axis_cutting(spec.placements, dim)
    assert axis is not None
    if dim in nested_dims(spec.placements):
        put(recut(local_of(rows), spec_of(rows), spec.placements), whole, dim, range(begin, begin + count * step, step))
        return

    def index(row: int) -> int:  # of the first of `rows` at or after that row of the whole
        return min(count, max(0, -(-(row - begin) // step)))

    local = redistributed(local_of(rows), spec_of(rows), spec.placements)
    mine = pulled(local, mesh, axis, dim, count, extent, lambda i0, i1: (index(i0), index(i1)))
    if mine.size(dim):
        i0 = chunk_of(mesh, axis, extent)[0]
        first = begin + index(i0) * step - i0
        aten.slice(local_of(whole), dim, first, first + (mine.size(dim) - 1) * step + 1, step).copy_(mine)


def _clamped(index: int | None, extent: int, default: int) -> int:
    if index is None:
        return default
    return min(extent, max(0, index + extent if index < 0 else index))


def _note_taken(tensor: Any, dim: int) -> None:
    """The gradient of rows of a cut dim, of a class token, is to be cut among zeros as the tensor is (`_among_zeros`)."""
    if not isinstance(tensor, DTensor):
        return
    if not is_spatial(tensor) or axis_cutting(spec_of(tensor).placements, dim_of(dim, tensor.dim())) is not None:
        note_taken(tensor)


def _among_zeros(rows: Any, sizes: list[int], dim: int, begin: int) -> DTensor | None:
    """Rows that every rank holds among zeros, for the gradient of what they were taken from, if that was cut along `dim`."""
    shape = torch.Size(sizes)
    known = axes_of(rows.device_mesh).taken_from.of(shape) if isinstance(rows, DTensor) and in_backward() else None
    if known is None:
        return None
    local, mesh, placements = summed(rows)
    cut = cut_further(placements, known, lambda its: its == dim)
    if cut == placements or any(plain_shard(p) and p.dim == dim for p in placements):
        return None
    first, last = interval(mesh, cut, dim, shape[dim])
    whole = local.new_zeros(resized(local.shape, dim, last - first))
    inside = [min(last, max(first, row)) for row in (begin, begin + local.size(dim))]
    count = inside[1] - inside[0]
    whole.narrow(dim, inside[0] - first, count).copy_(local.narrow(dim, inside[0] - begin if count else 0, count))
    return wrap(whole, mesh, cut, shape)


@spatial_rule("slice.Tensor")
@takes_nested
def slice(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, dim, start, end, step = bound(op, args, kwargs)
    _note_taken(tensor, dim)
    if not taken(tensor):
        return unruled(op, args, kwargs)
    dim = dim_of(dim, tensor.dim())
    extent = tensor.size(dim)
    return slice_rows(tensor, dim, _clamped(start, extent, 0), _clamped(end, extent, extent), step)


@spatial_rule("slice_backward")
@takes_nested
def slice_backward(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grad, sizes, dim, start, end, step = bound(op, args, kwargs)
    dim = dim_of(dim, len(sizes))
    extent = sizes[dim]
    begin = _clamped(start, extent, 0)
    if step == 1 and (laid := _among_zeros(grad, sizes, dim, begin)) is not None:
        return laid
    if not taken(grad):
        return unruled(op, args, kwargs)
    local, mesh, placements = summed(grad)
    out_extent = grad.size(dim)
    axis = axis_cutting(placements, dim)
    shape = torch.Size(sizes)
    if axis is None:
        local_sizes = list(local.shape)
        local_sizes[dim] = extent
        return wrap(op(local, local_sizes, dim, start, end, step), mesh, placements, shape)
    if dim in nested_dims(placements):
        first, last = interval(mesh, placements, dim, extent)
        whole = wrap(local.new_zeros(resized(local.shape, dim, last - first)), mesh, placements, shape)
        put(local, whole, dim, range(begin, begin + out_extent * step, step))
        return whole
    if step != 1:
        rows = local.new_zeros(resized(local.shape, dim, max(0, (local.size(dim) - 1) * step + 1)))
        aten.slice(rows, dim, 0, None, step).copy_(local)
        local = rows
    grad_input = pushed(
        local, mesh, axis, dim, extent, out_extent, lambda o0, o1: (begin + o0 * step, begin + (o1 - 1) * step + 1)
    )
    return wrap(grad_input, mesh, placements, shape)


@spatial_rule("select.int")
@takes_nested
def select(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, dim, index = bound(op, args, kwargs)
    _note_taken(tensor, dim)
    if not taken(tensor):
        return unruled(op, args, kwargs)
    dim = dim_of(dim, tensor.dim())
    extent = tensor.size(dim)
    if not -extent <= index < extent:
        raise IndexError(
            f"select(): index {index} out of range for tensor of size {list(tensor.shape)} at dimension {dim}"
        )
    index %= extent
    row, is_copy = _selected(tensor, dim, index)
    if not is_copy:
        return row
    return linked(
        tensor,
        row,
        lambda whole: _selected(whole, dim, index)[0],
        lambda row, whole: _put_row(row, whole, dim, index),
    )


def _selected(tensor: DTensor, dim: int, index: int) -> tuple[DTensor, bool]:
    """The row, and whether it is a copy."""
    local, mesh, placements = summed(tensor)
    shape, stride = torch.Size([*tensor.shape[:dim], *tensor.shape[dim + 1 :]]), tensor.stride()
    stride = (*stride[:dim], *stride[dim + 1 :])
    axis = axis_cutting(placements, dim)
    if axis is None:
        return wrap(aten.select(local, dim, index), mesh, without(placements, dim), shape, stride), False
    if dim in nested_dims(placements):
        one = picked(wrap(local, mesh, placements, tensor.shape), dim, range(index, index + 1))
        row = only_row(local_of(one), mesh, placements, dim)
    else:
        row = everywhere(local, mesh, axis, dim, tensor.size(dim), index, index + 1)
    return wrap(row.squeeze(dim), mesh, without(uncut(placements, dim), dim), shape, stride), True


def _put_row(row: DTensor, whole: DTensor, dim: int, index: int) -> None:
    """Writes `row`, which every rank of the axis that cuts `dim` holds, into the whole."""
    spec = spec_of(whole)
    i0, i1 = interval(spec.mesh, spec.placements, dim, whole.size(dim))
    local = redistributed(local_of(row), spec_of(row), without(uncut(spec.placements, dim), dim))
    if i0 <= index < i1:
        aten.select(local_of(whole), dim, index - i0).copy_(local)


@spatial_rule("select_backward")
@takes_nested
def select_backward(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grad, sizes, dim, index = bound(op, args, kwargs)
    if not isinstance(grad, DTensor):
        return unruled(op, args, kwargs)
    dim = dim_of(dim, len(sizes))
    known = axes_of(grad.device_mesh).taken_from.of(torch.Size(sizes))
    if known is not None:  # else the row is not made one for nothing
        laid = _among_zeros(grad.unsqueeze(dim), sizes, dim, index % sizes[dim])
        if laid is not None:
            return laid
    local, mesh, placements = summed(grad)
    wider = tuple(Shard(p.dim + 1) if plain_shard(p) and p.dim >= dim else p for p in placements)
    local_sizes = [*local.shape[:dim], sizes[dim], *local.shape[dim:]]
    return wrap(op(local, local_sizes, dim, index % sizes[dim]), mesh, wider, torch.Size(sizes))


@spatial_rule("unfold")
@takes_nested_if(other_dims)
def windows(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Every `step`-th window of `size` rows; from the rows of its first to those of its last one where the dim is cut."""
    tensor, dim, size, step = bound(op, args, kwargs)
    if not taken(tensor) or tensor.dim() == 0:
        return unruled(op, args, kwargs)
    local, mesh, placements = summed(tensor)
    dim = dim_of(dim, tensor.dim())
    extent = tensor.size(dim)
    if step <= 0 or not 0 <= size <= extent:
        raise ValueError(
            f"unfold: windows of {size} rows, {step} apart, of a dim of {extent}; the step must be positive"
        )
    count = (extent - size) // step + 1
    shape = torch.Size([*resized(tensor.shape, dim, count), size])
    stride = tensor.stride()
    stride = (*stride[:dim], stride[dim] * step, *stride[dim + 1 :], stride[dim])
    axis = axis_cutting(placements, dim)
    if axis is None:
        return wrap(aten.unfold(local, dim, size, step), mesh, placements, shape, stride)
    rows = pulled(local, mesh, axis, dim, extent, count, _of_windows(size, step))
    if rows.size(dim):
        part = aten.unfold(rows, dim, size, step)
    else:
        part = rows.new_zeros([*rows.shape, size])
    return linked(tensor, wrap(part, mesh, placements, shape, stride), *view_links(op, (dim, size, step), {}, 0, False))


@spatial_rule("unfold_backward")
def windows_backward(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grad, sizes, dim, size, step = bound(op, args, kwargs)
    if not taken(grad) or not sizes:
        return unruled(op, args, kwargs)
    local, mesh, placements = summed(grad)
    last, dim = grad.dim() - 1, dim % len(sizes)
    if axis_cutting(placements, last) is not None:  # windows that became the rows of a sequence
        turn = Turn(mesh, placements, grad.shape, {last})
        is_cut_twice = bool(nested_dims(turn.turned))  # the windows were cut already, and no other dim was long enough
        if not turn.possible or is_cut_twice:
            return unruled(op, args, kwargs)
        local, placements = turn.there(local, grad.shape)[0], turn.turned
    axis, count = axis_cutting(placements, dim), local.size(dim)
    covered = sizes[dim] if axis is None else (count - 1) * step + size if count else 0
    local_sizes = resized(local.shape[:-1], dim, covered)
    rows = op(local, list(local_sizes), dim, size, step) if local.numel() else local.new_zeros(local_sizes)
    if axis is not None:
        rows = pushed(rows, mesh, axis, dim, sizes[dim], grad.size(dim), _of_windows(size, step))
    return wrap(rows, mesh, placements, torch.Size(sizes))


def _of_windows(size: int, step: int) -> Wants:
    return lambda o0, o1: (o0 * step, (o1 - 1) * step + size)


@spatial_rule("split.Tensor", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes")
@takes_nested
def split(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, sizes, dim = bound(op, args, kwargs)
    if not taken(tensor):
        return unruled(op, args, kwargs)
    dim = dim_of(dim, tensor.dim())
    extent = tensor.size(dim)
    if isinstance(sizes, int):
        if sizes < 0:
            raise RuntimeError(f"split: a part has as many rows as are given or none, but they are {sizes}")
        sizes = [min(sizes, extent - begin) for begin in range(0, extent, sizes)] if extent else [0]
    elif sum(sizes) != extent or min(sizes, default=0) < 0:
        raise RuntimeError(f"split_with_sizes: {list(sizes)} do not sum to {extent}, the size of dimension {dim}")
    pieces, begin = [], 0
    for size in sizes:
        pieces.append(slice_rows(tensor, dim, begin, begin + size))
        begin += size
    return pieces


@spatial_rule("unbind")
@takes_nested
def unbind(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, dim = bound(op, args, kwargs)
    if not taken(tensor):
        return unruled(op, args, kwargs)
    return [select(aten.select.int, (tensor, dim, index), {}) for index in range(tensor.size(dim))]
