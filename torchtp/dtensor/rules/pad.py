"""Reflection, replication and circular pads of cut DTensors: rows from before, from within and from behind."""

from __future__ import annotations

from typing import Any

import torch

from torchtp.dtensor.moving import Wants, chunk_of, pulled, pushed, shifted
from torchtp.dtensor.own_images import takes_images_cut_twice
from torchtp.dtensor.registry import bound, composite_rule, spatial_rule
from torchtp.dtensor.rules.fallback import has_strided_shard, unruled
from torchtp.dtensor.rules.shape import axis_cutting, resized, summed
from torchtp.dtensor.sharing import local_as
from torchtp.dtensor.spatial import is_spatial
from torchtp.dtensor.upstream import Op
from torchtp.dtensor.wrapping import wrap_in_format

aten = torch.ops.aten
Piece = tuple[int, int, Wants, str]  # the output rows [begin, end) it fills, the rows it needs, how they lie in it


def _pieces(mode: str, extent: int, before: int, after: int) -> list[Piece]:
    behind = before + extent
    out_extent = behind + after
    within: Piece = (max(0, before), min(out_extent, behind), shifted(-before, 0, extent), "as they are")
    if mode == "reflection":
        left: Piece = (0, before, lambda o0, o1: (before - o1 + 1, before - o0 + 1), "mirrored")
        last = 2 * extent - 2 + before
        right: Piece = (behind, out_extent, lambda o0, o1: (last - o1 + 1, last - o0 + 1), "mirrored")
    else:
        left = (0, before, lambda o0, o1: (0, 1), "repeated")
        right = (behind, out_extent, lambda o0, o1: (extent - 1, extent), "repeated")
    return [piece for piece in (left, within, right) if piece[0] < piece[1]]


def _clipped(piece: Piece) -> Wants:
    begin, end, wants, _ = piece

    def clipped(o0: int, o1: int) -> tuple[int, int]:
        o0, o1 = max(o0, begin), min(o1, end)
        return wants(o0, o1) if o0 < o1 else (0, 0)

    return clipped


def _padding(mode: str, pad: list[int], num_dims: int) -> list[tuple[int, int, int]]:
    """(dim, before, after) of every padded dim."""
    return [(num_dims - 1 - i, pad[2 * i], pad[2 * i + 1]) for i in range(len(pad) // 2)]


def _check(mode: str, pad: list[int], shape: torch.Size) -> None:
    """RuntimeError, as of whole tensors, where nothing is left of a dim or a reflection has not so many rows."""
    for dim, before, after in _padding(mode, pad, len(shape)):
        if mode == "reflection" and max(before, after) >= shape[dim]:
            raise RuntimeError(
                f"reflection padding of dim {dim} takes at most {shape[dim] - 1} rows of an extent of {shape[dim]}, but it "
                f"is {before} and {after}"
            )
        if shape[dim] + before + after < 1:
            raise RuntimeError(f"padding {before} and {after} leaves nothing of dim {dim} of extent {shape[dim]}")


@spatial_rule(*(f"{mode}_pad{n}d" for mode in ("reflection", "replication") for n in (1, 2, 3)))
@takes_images_cut_twice
def mirror_pad(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, pad = bound(op, args, kwargs)
    if not is_spatial(tensor) or has_strided_shard(tensor):
        return unruled(op, args, kwargs)
    mode = op._schema.name.split("::")[1].split("_")[0]
    _check(mode, list(pad), tensor.shape)
    local, mesh, placements = summed(tensor)
    whole, shape = list(pad), tensor.shape
    for i, (dim, before, after) in enumerate(_padding(mode, pad, tensor.dim())):
        axis, extent = axis_cutting(placements, dim), tensor.size(dim)
        shape = resized(shape, dim, extent + before + after)
        if axis is None:
            continue
        whole[2 * i] = whole[2 * i + 1] = 0
        mine = chunk_of(mesh, axis, shape[dim])
        parts = []
        for piece in _pieces(mode, extent, before, after):
            rows = pulled(local, mesh, axis, dim, extent, shape[dim], _clipped(piece))
            count = max(0, min(mine[1], piece[1]) - max(mine[0], piece[0]))
            if piece[3] == "mirrored":
                rows = rows.flip(dim)
            elif piece[3] == "repeated" and count:
                rows = rows.expand(resized(rows.shape, dim, count))
            parts.append(rows)
        local = aten.cat(parts, dim)
    if any(whole):
        local = op(local, whole) if local.numel() else aten.constant_pad_nd(local, whole)
    return wrap_in_format(local, mesh, placements, shape, tensor)


@spatial_rule(*(f"{mode}_pad{n}d_backward" for mode in ("reflection", "replication") for n in (1, 2, 3)))
@takes_images_cut_twice
def mirror_pad_backward(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grad_output, tensor, pad = bound(op, args, kwargs)
    if not is_spatial(tensor) or has_strided_shard(tensor):
        return unruled(op, args, kwargs)
    mode = op._schema.name.split("::")[1].split("_")[0]
    local, mesh, placements = summed(tensor)
    grad = local_as(grad_output, mesh, placements)
    whole = list(pad)
    for i, (dim, before, after) in enumerate(_padding(mode, pad, tensor.dim())):
        axis, extent = axis_cutting(placements, dim), tensor.size(dim)
        if axis is None:
            continue
        whole[2 * i] = whole[2 * i + 1] = 0
        out_extent = extent + before + after
        mine = chunk_of(mesh, axis, out_extent)
        total = None
        for piece in _pieces(mode, extent, before, after):
            begin, end = max(mine[0], piece[0]), min(mine[1], piece[1])
            count = max(0, end - begin)
            rows = grad.narrow(dim, begin - mine[0] if count else 0, count)
            if piece[3] == "mirrored":
                rows = rows.flip(dim)
            elif piece[3] == "repeated" and count:
                rows = rows.sum(dim, keepdim=True)
            rows = pushed(rows.contiguous(), mesh, axis, dim, extent, out_extent, _clipped(piece))
            total = rows if total is None else total + rows
        assert total is not None
        grad = total
    if any(whole):
        grad = op(grad, local, whole) if local.numel() else aten.zeros_like(local)
    return wrap_in_format(grad, mesh, placements, tensor.shape, tensor)


@composite_rule("_pad_circular")
def circular_pad(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Slices of what lies at the other end, put in front and behind."""
    tensor, pad = args
    for dim, before, after in _padding("circular", pad, tensor.dim()):
        extent = tensor.size(dim) + min(0, before) + min(0, after)
        within = tensor.narrow(dim, max(0, -before), extent)  # a negative pad crops, and what is left goes round
        parts = [within]
        if before > 0:
            parts.insert(0, within.narrow(dim, extent - before, before))
        if after > 0:
            parts.append(within.narrow(dim, 0, after))
        tensor = torch.cat(parts, dim)
    return tensor.contiguous()  # as one device writes it
