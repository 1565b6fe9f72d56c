"""Many cut rows added up where a table has them that is whole, voxels of a bird's eye view say, or what the codes of a codebook stand for.

Each rank adds its own rows up, and the ranks' tables are summed.
"""

from __future__ import annotations

from typing import Any

import torch

from torchtp.dtensor.cut import axes_cutting, dim_of
from torchtp.dtensor.moving import all_reduced, recut_tensor
from torchtp.dtensor.nesting import takes_nested_if
from torchtp.dtensor.registry import bound, spatial_rule
from torchtp.dtensor.rules.counting import extremes
from torchtp.dtensor.rules.fallback import is_short_list, unruled
from torchtp.dtensor.rules.reduction import wide
from torchtp.dtensor.rules.shape import summed, taken
from torchtp.dtensor.sharing import local_as
from torchtp.dtensor.spatial import is_replicated
from torchtp.dtensor.upstream import DeviceMesh, DTensor, Op, Replicate, Shard, local_of, plain_shard
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
        return _add_to(tensor, total)
    table = wrap(local_as(tensor, mesh, kept) + local_of(total), mesh, kept, tensor.shape)
    if is_short_list(table):
        return recut_tensor(table, (Replicate(),) * mesh.ndim)
    if tensor.size(at) == 1:
        return table
    return recut_tensor(table, tuple(Shard(at) if axis in axes else p for axis, p in enumerate(kept)))


def scattered_up(table: Any, dim: int, index: Any, source: Any, in_place: bool) -> Any | None:
    """The same of `scatter_add`."""
    if not is_replicated(table) or not taken(source) or index.shape != source.shape or source.dtype != table.dtype:
        return None
    if index.dim() != table.dim() or any(index.size(d) > table.size(d) for d in range(index.dim()) if d != dim):
        return None
    local, mesh, placements = summed(source)
    axes = axes_cutting(placements, [dim])
    if not axes or any(plain_shard(p) and p.dim != dim and source.size(p.dim) != table.size(p.dim) for p in placements):
        return None
    numbers = local_as(index, mesh, placements)
    _check_within(numbers, 0, table.size(dim), dim, mesh, axes_cutting(placements))
    kept = tuple(Replicate() if axis in axes or not plain_shard(p) else p for axis, p in enumerate(placements))
    own = local_as(table, mesh, kept)
    sums = own.new_zeros(own.shape, dtype=wide(local.dtype))
    aten.scatter_add_(sums, dim, numbers, local.to(sums.dtype))
    total = all_reduced(sums, mesh, axes).to(local.dtype)
    if in_place:
        return _add_to(table, wrap(total, mesh, kept, table.shape))
    result = wrap(own + total, mesh, kept, table.shape)
    return result if is_short_list(result) or table.size(dim) == 1 else recut_tensor(result, placements)


def _add_to(table: torch.Tensor, total: DTensor) -> torch.Tensor:
    """In place, to what every rank holds."""
    mesh = total.device_mesh
    whole = local_as(total, mesh, (Replicate(),) * mesh.ndim)
    (local_of(table) if isinstance(table, DTensor) else table).add_(whole)
    return table


def _takes_rows(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], dims: set[int]) -> bool:
    table, dim, _, source, how, _ = bound(op, args, kwargs)
    return how in ("sum", "mean") and is_replicated(table) and dims == {dim_of(dim, source.dim())}


@spatial_rule("scatter_reduce.two")
@takes_nested_if(_takes_rows)
def scatter_reduce(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sums and means of cut rows in a table that is whole."""
    table, dim, index, source, how, takes_table = bound(op, args, kwargs)
    if how not in ("sum", "mean") or not table.is_floating_point() or not is_replicated(table):
        return unruled(op, args, kwargs)
    dim, before = dim_of(dim, table.dim()), table if takes_table else aten.zeros_like(table)
    total = scattered_up(before, dim, index, source, False)
    if total is None:
        return unruled(op, args, kwargs)
    if how == "sum" and takes_table:
        return total
    dtype = wide(table.dtype)
    at_first = torch.full(table.shape, float(takes_table), dtype=dtype, device=table.device)
    counts = scattered_up(at_first, dim, index, aten.ones_like(source, dtype=dtype), False)
    if how == "mean":
        total = aten.div(total, aten.clamp(counts, min=1)).to(table.dtype)
    return total if takes_table else aten.where(aten.gt(counts, 0), total, table)


def _check_within(numbers: torch.Tensor, least: int, extent: int, dim: int, mesh: DeviceMesh, axes: list[int]) -> None:
    """IndexError on all ranks for a number of any of them beyond its dim."""
    if numbers.is_meta:
        return
    lowest, highest = extremes(numbers, mesh, axes)
    if highest >= extent or lowest < least:
        beyond = highest if highest >= extent else lowest
        raise IndexError(f"index {beyond:.0f} is out of bounds for dimension {dim} with size {extent}")
