"""Points picked and put by lists of numbers or by masks, elements filled by a mask, and embeddings of cut numbers."""

from __future__ import annotations

import math
from typing import Any

import torch

from torchtp.dtensor.agreed import on_all_parts
from torchtp.dtensor.cut import Placements, axes_cutting, axes_of, dim_of, partial_over_shards, sums_done
from torchtp.dtensor.moving import all_reduced, recut_tensor
from torchtp.dtensor.nesting import takes_nested
from torchtp.dtensor.registry import bound, spatial_rule
from torchtp.dtensor.rules.adding import added_up
from torchtp.dtensor.rules.fallback import is_short_list, unruled
from torchtp.dtensor.rules.masked import Masked, masked_of
from torchtp.dtensor.rules.points import Points, lists_of, points_of
from torchtp.dtensor.rules.pointwise import pointwise, pointwise_in_place
from torchtp.dtensor.rules.shape import resized, summed, taken
from torchtp.dtensor.sharing import hand_out, local_as
from torchtp.dtensor.spatial import is_spatial
from torchtp.dtensor.upstream import DTensor, Op, Replicate, Shard, in_backward, node_in_backward, plain_shard, spec_of
from torchtp.dtensor.wrapping import wrap

aten = torch.ops.aten


def _points(op: Op, tensor: Any, indices: Any) -> Points | Masked | None:
    """Where lists, or a mask, point into a cut tensor."""
    if not taken(tensor) or not any(index is not None for index in indices):
        return None
    spec = spec_of(tensor)
    place = tensor.shape, spec.mesh, sums_done(spec.placements)
    mask = _lone_mask(tensor, indices)
    masked = masked_of(*place, *mask) if mask is not None else None
    if masked is not None:
        return masked
    lists = lists_of(op, indices, tensor.shape)
    return None if lists is None else points_of(*place, lists)


def _lone_mask(tensor: Any, indices: Any) -> tuple[int, Any] | None:
    """The mask that alone picks elements, after the first of its dims."""
    given = [dim for dim, index in enumerate(indices) if index is not None]
    if len(given) != 1:
        return None
    at, mask = given[0], indices[given[0]]
    is_mask = mask.dtype is torch.bool and mask.dim() and mask.shape == tensor.shape[at : at + mask.dim()]
    return (at, mask) if is_mask else None


def _cut_as_mask(tensor: Any, indices: Any) -> Any:
    """A whole tensor as the mask is cut that picks its elements."""
    found = _lone_mask(tensor, indices) if _is_whole(tensor) else None
    if found is None or not taken(found[1]):
        return tensor
    spec = spec_of(found[1])
    mesh, placements = spec.mesh, _behind(sums_done(spec.placements), found[0])
    return wrap(local_as(tensor, mesh, placements), mesh, placements, tensor.shape)


def _one_mask(tensor: Any, indices: Any) -> torch.Tensor | None:
    """The mask that alone picks elements, and either is cut, so that it broadcasts to the tensor."""
    found = _lone_mask(tensor, indices) if isinstance(tensor, DTensor) else None
    if found is None or not (taken(tensor) or is_spatial(found[1])):
        return None
    at, mask = found
    for _ in range(tensor.dim() - at - mask.dim()):
        mask = mask.unsqueeze(-1)
    return mask


@spatial_rule("index.Tensor", "_unsafe_index.Tensor")
@takes_nested
def index(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, indices = bound(op, args, kwargs)
    result = _picked(op, _cut_as_mask(tensor, indices), indices, tensor.requires_grad)
    if result is None:
        result = _looked_up(op, tensor, indices)
    return unruled(op, args, kwargs) if result is None else result


def _picked(op: Op, tensor: Any, indices: Any, requires_grad: bool) -> DTensor | None:
    points = _points(op, tensor, indices)
    if points is None:
        return None
    local, mesh, placements = summed(tensor)
    if points.axes:
        axes_of(mesh).picked_from.note(tensor.shape, placements, requires_grad)
    picked = wrap(points.pick(local), mesh, points.placements, points.shape)
    return recut_tensor(picked, (Replicate(),) * mesh.ndim) if points.axes and is_short_list(picked) else picked


@spatial_rule("index_put", "index_put_", "_unsafe_index_put", "_index_put_impl_")
@takes_nested
def index_put(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, indices, values, *others = bound(op, args, kwargs)
    in_place = op._schema.name.endswith("_")
    accumulate = bool(others and others[0])
    mask = _one_mask(tensor, indices)
    if mask is not None and values.dim() == 0 and not accumulate:  # x[x > 1] = 1
        fill = (pointwise_in_place, aten.masked_fill_) if in_place else (pointwise, aten.masked_fill)
        return fill[0](fill[1].Tensor, (tensor, mask, values), {})
    result = _put(op, tensor, indices, values, accumulate, in_place)
    if result is None and node_in_backward("IndexBackward0") is not None:
        result = _looked_up_backward(op, tensor, indices, values)
    if result is None and accumulate:
        result = added_up(tensor, indices, values, in_place, from_end=True)
    return unruled(op, args, kwargs) if result is None else result


def _put(op: Op, tensor: Any, indices: Any, values: Any, accumulate: bool, in_place: bool) -> DTensor | None:
    return _put_at(_points(op, tensor, indices), tensor, values, accumulate, in_place)


def _put_at(
    points: Points | Masked | None, tensor: DTensor, values: torch.Tensor, accumulate: bool, in_place: bool
) -> DTensor | None:
    if points is None or values.dtype != tensor.dtype or not _broadcasts(values.shape, points.shape):
        return None
    local, mesh, placements = summed(tensor)
    if in_place and placements != spec_of(tensor).placements:
        return None
    target = local if in_place else local.clone()
    points.put(target, points.part_of(values), accumulate)
    return tensor if in_place else wrap(target, mesh, placements, tensor.shape)


@spatial_rule("masked_select")
@takes_nested
def masked_select(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, mask = bound(op, args, kwargs)
    if not taken(tensor) and not taken(mask):
        return unruled(op, args, kwargs)
    hand_out(tensor)  # what it is expanded to here has no gradient
    shape = torch.broadcast_shapes(tensor.shape, mask.shape)
    return index(aten.index.Tensor, (tensor.expand(shape), [mask.bool().expand(shape)]), {})


@spatial_rule("masked_scatter", "masked_scatter_")
@takes_nested
def masked_scatter(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Elements of the source, in their order, where the mask is true."""
    tensor, mask, source = bound(op, args, kwargs)
    in_place = op._schema.name.endswith("_")
    for given in (tensor, source):
        hand_out(given)  # what they are expanded or cut to here has no gradient
    shape = tensor.shape if in_place else torch.broadcast_shapes(tensor.shape, mask.shape)
    indices = [mask.bool().expand(shape)]
    target = tensor if in_place else _cut_as_mask(tensor.expand(shape), indices)
    points = _points(op, target, indices)
    if points is None or source.numel() < points.shape[0]:
        return unruled(op, args, kwargs)
    result = _put_at(points, target, source.reshape(-1)[: points.shape[0]], False, in_place)
    return unruled(op, args, kwargs) if result is None else result


@spatial_rule("masked_scatter_backward")
@takes_nested
def masked_scatter_backward(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The gradient of the source: zero for the elements that were not needed."""
    grad, mask, sizes = bound(op, args, kwargs)
    if not taken(grad) and not taken(mask):
        return unruled(op, args, kwargs)
    used = masked_select(aten.masked_select.default, (grad, mask), {})
    unused = math.prod(sizes) - used.numel()
    return (torch.cat([used, used.new_zeros(unused)]) if unused else used).view(sizes)


def _broadcasts(shape: torch.Size, to: torch.Size) -> bool:
    return len(shape) <= len(to) and all(a in (1, b) for a, b in zip(reversed(shape), reversed(to), strict=False))


def _one_cut_index(tensor: Any, indices: Any) -> tuple[int, DTensor] | None:
    """The dim of a whole tensor and the cut numbers that look it up: a palette of labels, weights of classes."""
    given = [dim for dim, index in enumerate(indices) if index is not None]
    if not _is_whole(tensor) or len(given) != 1 or not taken(indices[given[0]]):
        return None
    numbers = indices[given[0]]
    fits = numbers.dtype in (torch.int64, torch.int32) and not any(p.is_partial() for p in numbers.placements)
    return (given[0], numbers) if fits else None


def _behind(placements: Placements, dim: int) -> Placements:
    """The placements with `dim` whole dims before."""
    return tuple(Shard(p.dim + dim) if plain_shard(p) else p for p in placements)


def _looked_up(op: Op, tensor: Any, indices: Any) -> DTensor | None:
    found = _one_cut_index(tensor, indices)
    if found is None:
        return None
    dim, numbers = found
    local, mesh, placements = summed(numbers)
    table = local_as(tensor, mesh, (Replicate(),) * mesh.ndim)
    shape = torch.Size([*tensor.shape[:dim], *numbers.shape, *tensor.shape[dim + 1 :]])
    rows = on_all_parts(op, local, lambda: op(table, [None] * dim + [local]), mesh, placements)
    return wrap(rows, mesh, _behind(placements, dim), shape)


def _looked_up_backward(op: Op, zeros: Any, indices: Any, grad: Any) -> DTensor | None:
    """Each rank's share of the gradient of a table that is whole."""
    found = _one_cut_index(zeros, indices)
    if found is None or grad.dtype != zeros.dtype:
        return None
    dim, numbers = found
    local, mesh, placements = summed(numbers)
    table = local_as(zeros, mesh, (Replicate(),) * mesh.ndim)
    mine = local_as(grad, mesh, _behind(placements, dim))
    added = aten.index_put(table, [None] * dim + [local], mine, True)
    return wrap(added, mesh, partial_over_shards(placements), zeros.shape)


def _along(dim: int, numbers: Any) -> list[Any]:
    return [None] * dim + [numbers]


@spatial_rule("index_select")
@takes_nested
def index_select(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, dim, numbers = bound(op, args, kwargs)
    along = _along(dim_of(dim, tensor.dim()), numbers)
    result = _picked(op, tensor, along, tensor.requires_grad)
    if result is None and numbers.dim() == 1:
        result = _looked_up(aten.index.Tensor, tensor, along)
    return unruled(op, args, kwargs) if result is None else result


@spatial_rule("index_add", "index_add_")
@takes_nested
def index_add(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, dim, numbers, source, alpha = bound(op, args, kwargs)
    in_place = op._schema.name.endswith("_")
    dim = dim_of(dim, tensor.dim())
    fits = source.dim() == tensor.dim() and source.shape == resized(tensor.shape, dim, numbers.numel())
    hand_out(source)  # its product here has no gradient
    added = source if alpha == 1 else source * alpha
    result = _put(op, tensor, _along(dim, numbers), added, True, in_place) if fits else None
    if result is None and fits and numbers.dim() == 1:
        result = added_up(tensor, _along(dim, numbers), added, in_place, from_end=False)
    return unruled(op, args, kwargs) if result is None else result


@spatial_rule("index_copy", "index_copy_", "index_fill", "index_fill_")
@takes_nested
def index_written(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, dim, numbers, values = bound(op, args, kwargs)
    in_place = op._schema.name.endswith("_")
    dim = dim_of(dim, tensor.dim())
    if not isinstance(values, torch.Tensor):
        values = torch.full((), values, dtype=tensor.dtype, device=tensor.device)
    is_fill = "fill" in op._schema.name
    fits = values.dim() == 0 if is_fill else values.shape == resized(tensor.shape, dim, numbers.numel())
    result = _put(op, tensor, _along(dim, numbers.reshape(-1)), values, False, in_place) if fits else None
    return unruled(op, args, kwargs) if result is None else result


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
    rows = on_all_parts(op, local, lambda: op(table, local, *others), mesh, placements)
    return wrap(rows, mesh, placements, torch.Size([*numbers.shape, table.size(1)]))


@spatial_rule("embedding_dense_backward")
@takes_nested
def embedding_dense_backward(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grad, numbers, num_weights, padding_idx, by_frequency = bound(op, args, kwargs)
    lead = numbers if taken(numbers) else grad  # numbers of few points are whole
    if not taken(lead) or by_frequency or any(plain_shard(p) and p.dim == numbers.dim() for p in lead.placements):
        return unruled(op, args, kwargs)
    _, mesh, placements = summed(lead)
    local = local_as(numbers, mesh, placements)
    table = op(local_as(grad, mesh, placements), local, num_weights, padding_idx, False)
    if in_backward():
        return wrap(table, mesh, partial_over_shards(placements), table.shape)  # whoever adds it up, does it once
    axes = axes_cutting(placements)
    return wrap(all_reduced(table, mesh, axes), mesh, (Replicate(),) * mesh.ndim, table.shape)
