"""Rows picked by a list of numbers along a dim that is whole (channels put in another order), elements filled by a mask, and embeddings of cut numbers."""

from __future__ import annotations

from typing import Any

import torch

from torchtp.dtensor.cut import partial_over_shards
from torchtp.dtensor.fallback import unruled
from torchtp.dtensor.moving import all_reduced
from torchtp.dtensor.nesting import takes_nested
from torchtp.dtensor.pointwise import pointwise, pointwise_in_place
from torchtp.dtensor.registry import bound, spatial_rule
from torchtp.dtensor.shape import axis_cutting, resized, summed, taken
from torchtp.dtensor.sharing import local_as
from torchtp.dtensor.spatial import is_spatial
from torchtp.dtensor.upstream import DTensor, Op, Partial, Replicate, in_backward, local_of, plain_shard, spec_of
from torchtp.dtensor.wrapping import wrap

aten = torch.ops.aten


def _list_of(index: Any) -> torch.Tensor | None:
    """A list of row numbers that every rank holds; None for any other index."""
    if isinstance(index, DTensor):
        index = None if is_spatial(index) or any(isinstance(p, Partial) for p in index.placements) else local_of(index)
    if index is None or index.dim() != 1 or index.dtype not in (torch.int64, torch.int32):
        return None
    return index


def _one_list(tensor: Any, indices: Any) -> tuple[int, torch.Tensor] | None:
    """The dim and the row numbers, where a cut tensor is indexed along one whole dim only."""
    given = [dim for dim, index in enumerate(indices) if index is not None]
    if not taken(tensor) or len(given) != 1 or axis_cutting(spec_of(tensor).placements, given[0]) is not None:
        return None
    rows = _list_of(indices[given[0]])
    return None if rows is None else (given[0], rows)


def _one_mask(tensor: Any, indices: Any) -> torch.Tensor | None:
    """The mask that alone picks elements, and either is cut, so that it broadcasts to the tensor."""
    given = [dim for dim, index in enumerate(indices) if index is not None]
    if not isinstance(tensor, DTensor) or len(given) != 1 or not (taken(tensor) or is_spatial(indices[given[0]])):
        return None
    mask: torch.Tensor = indices[given[0]]
    behind = tensor.dim() - given[0] - mask.dim()
    if mask.dtype is not torch.bool or not mask.dim() or mask.shape != tensor.shape[given[0] : tensor.dim() - behind]:
        return None
    for _ in range(behind):
        mask = mask.unsqueeze(-1)
    return mask


@spatial_rule("index.Tensor", "_unsafe_index.Tensor")
@takes_nested
def index(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, indices = bound(op, args, kwargs)
    found = _one_list(tensor, indices)
    if found is None:
        return unruled(op, args, kwargs)
    dim, rows = found
    local, mesh, placements = summed(tensor)
    return wrap(op(local, [None] * dim + [rows]), mesh, placements, resized(tensor.shape, dim, rows.size(0)))


@spatial_rule("index_put", "index_put_", "_unsafe_index_put", "_index_put_impl_")
@takes_nested
def index_put(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, indices, values, *others = bound(op, args, kwargs)
    found = _one_list(tensor, indices)
    in_place = op._schema.name.endswith("_")
    mask = _one_mask(tensor, indices)
    if mask is not None and values.dim() == 0 and not (others and others[0]):  # x[x > 1] = 1
        fill = (pointwise_in_place, aten.masked_fill_) if in_place else (pointwise, aten.masked_fill)
        return fill[0](fill[1].Tensor, (tensor, mask, values), {})
    if found is None:
        return unruled(op, args, kwargs)
    dim, rows = found
    local, mesh, placements = summed(tensor)
    if tuple(values.shape) == tuple(resized(tensor.shape, dim, rows.size(0))):
        values = local_as(values, mesh, placements)
    elif values.dim() == 0:
        values = local_of(values) if isinstance(values, DTensor) else values
    else:
        return unruled(op, args, kwargs)
    result = op(local, [None] * dim + [rows], values, *others)
    return tensor if in_place else wrap(result, mesh, placements, tensor.shape)


@spatial_rule("index_select")
@takes_nested
def index_select(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, dim, numbers = bound(op, args, kwargs)
    rows, dim = _list_of(numbers), dim % tensor.dim()
    if not taken(tensor) or rows is None or axis_cutting(spec_of(tensor).placements, dim) is not None:
        return unruled(op, args, kwargs)
    local, mesh, placements = summed(tensor)
    return wrap(op(local, dim, rows), mesh, placements, resized(tensor.shape, dim, rows.size(0)))


@spatial_rule("index_add", "index_add_")
@takes_nested
def index_add(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, dim, numbers, source, alpha = bound(op, args, kwargs)
    rows, dim = _list_of(numbers), dim % tensor.dim()
    in_place = op._schema.name.endswith("_")
    if not taken(tensor) or rows is None or axis_cutting(spec_of(tensor).placements, dim) is not None:
        return unruled(op, args, kwargs)
    local, mesh, placements = summed(tensor)
    result = op(local, dim, rows, local_as(source, mesh, placements), alpha=alpha)
    return tensor if in_place else wrap(result, mesh, placements, tensor.shape)


def _is_whole(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, DTensor) or all(p.is_replicate() for p in tensor.placements)


@spatial_rule("embedding")
@takes_nested
def embedding(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    weight, numbers, *others = bound(op, args, kwargs)
    if not taken(numbers) or not _is_whole(weight):
        return unruled(op, args, kwargs)
    local, mesh, placements = summed(numbers)
    table = local_as(weight, mesh, (Replicate(),) * mesh.ndim)
    return wrap(op(table, local, *others), mesh, placements, torch.Size([*numbers.shape, table.size(1)]))


@spatial_rule("embedding_dense_backward")
@takes_nested
def embedding_dense_backward(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grad, numbers, num_weights, padding_idx, by_frequency = bound(op, args, kwargs)
    if not taken(numbers) or by_frequency:
        return unruled(op, args, kwargs)
    local, mesh, placements = summed(numbers)
    table = op(local_as(grad, mesh, placements), local, num_weights, padding_idx, False)
    if in_backward():
        return wrap(table, mesh, partial_over_shards(placements), table.shape)  # whoever adds it up, does it once
    axes = [axis for axis, placement in enumerate(placements) if plain_shard(placement)]
    return wrap(all_reduced(table, mesh, axes), mesh, (Replicate(),) * mesh.ndim, table.shape)
