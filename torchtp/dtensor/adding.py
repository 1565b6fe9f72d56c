"""Many cut rows added up where a table has them that is whole, voxels of a bird's eye view say, or what the codes of a codebook stand for.

Each rank adds its own rows up, and the ranks' tables are summed.
"""

from __future__ import annotations

from typing import Any

import torch

from torchtp.dtensor.counting import extremes
from torchtp.dtensor.cut import axes_cutting
from torchtp.dtensor.fallback import is_short_list
from torchtp.dtensor.moving import all_reduced, recut_tensor
from torchtp.dtensor.reduction import wide
from torchtp.dtensor.shape import summed, taken
from torchtp.dtensor.sharing import local_as
from torchtp.dtensor.spatial import is_replicated
from torchtp.dtensor.upstream import DeviceMesh, DTensor, Replicate, Shard, local_of, plain_shard
from torchtp.dtensor.wrapping import wrap

aten = torch.ops.aten


def added_up(tensor: Any, indices: Any, values: Any, in_place: bool, from_end: bool) -> Any | None:
    """What `index_put` gives that adds cut values to a tensor that is whole; None where it is no such call.

    `from_end`: whether numbers less than 0 count from the end, as they do not to `index_add`.

    IndexError for a number beyond its dim, on all ranks.
    """
    given = [dim for dim, index in enumerate(indices) if index is not None]
    if not given or not is_replicated(tensor) or not taken(values) or values.dtype != tensor.dtype:
        return None
    at, end, lists = given[0], given[-1] + 1, [indices[dim] for dim in given]
    shape = (*tensor.shape[:at], lists[0].numel(), *tensor.shape[end:])
    if end - at != len(given) or values.shape != shape or any(each.shape != lists[0].shape for each in lists):
        return None
    if (
        values.dtype is torch.bool
        or lists[0].dim() != 1
        or any(each.dtype not in (torch.int64, torch.int32) for each in lists)
    ):
        return None
    local, mesh, placements = summed(values)
    axes = axes_cutting(placements, [at])
    of_lists = tuple(Shard(0) if axis in axes else Replicate() for axis in range(mesh.ndim))
    own = [local_as(each, mesh, of_lists).to(torch.int64) for each in lists]
    for dim, numbers in zip(given, own, strict=True):
        _check_within(numbers, -tensor.size(dim) if from_end else 0, tensor.size(dim), dim, mesh, axes)
    sums = local.new_zeros((*local.shape[:at], *tensor.shape[at:end], *local.shape[at + 1 :]), dtype=wide(local.dtype))
    aten.index_put_(sums, [None] * at + own, local.to(sums.dtype), True)
    more = len(given) - 1
    kept = tuple(
        Replicate() if axis in axes or not plain_shard(p) else Shard(p.dim + more if p.dim > at else p.dim)
        for axis, p in enumerate(placements)
    )
    total = wrap(all_reduced(sums, mesh, axes).to(local.dtype), mesh, kept, tensor.shape)
    if in_place:
        whole = local_as(total, mesh, (Replicate(),) * mesh.ndim)
        (local_of(tensor) if isinstance(tensor, DTensor) else tensor).add_(whole)
        return tensor
    table = wrap(local_as(tensor, mesh, kept) + local_of(total), mesh, kept, tensor.shape)
    if is_short_list(table):
        return recut_tensor(table, (Replicate(),) * mesh.ndim)
    if tensor.size(at) == 1:
        return table
    return recut_tensor(table, tuple(Shard(at) if axis in axes else p for axis, p in enumerate(kept)))


def scattered_up(table: Any, dim: int, index: Any, source: Any, in_place: bool) -> Any | None:
    """The same of `scatter_add`, for what is cut along `dim` alone."""
    if not is_replicated(table) or not taken(source) or index.shape != source.shape or source.dtype != table.dtype:
        return None
    if index.dim() != table.dim() or any(index.size(d) > table.size(d) for d in range(index.dim()) if d != dim):
        return None
    local, mesh, placements = summed(source)
    if any(plain_shard(p) and p.dim != dim for p in placements):
        return None
    numbers, whole = local_as(index, mesh, placements), (Replicate(),) * mesh.ndim
    axes = axes_cutting(placements)
    _check_within(numbers, 0, table.size(dim), dim, mesh, axes)
    sums = local.new_zeros(table.shape, dtype=wide(local.dtype))
    aten.scatter_add_(sums, dim, numbers, local.to(sums.dtype))
    total = all_reduced(sums, mesh, axes).to(local.dtype)
    if in_place:
        (local_of(table) if isinstance(table, DTensor) else table).add_(total)
        return table
    result = wrap(local_as(table, mesh, whole) + total, mesh, whole, table.shape)
    return result if is_short_list(result) or table.size(dim) == 1 else recut_tensor(result, placements)


def _check_within(numbers: torch.Tensor, least: int, extent: int, dim: int, mesh: DeviceMesh, axes: list[int]) -> None:
    """IndexError on all ranks for a number of any of them beyond its dim."""
    if numbers.is_meta:
        return
    lowest, highest = extremes(numbers, mesh, axes)
    if highest >= extent or lowest < least:
        beyond = highest if highest >= extent else lowest
        raise IndexError(f"index {beyond:.0f} is out of bounds for dimension {dim} with size {extent}")
