"""Ops along some dims of cut DTensors: local where these are whole; where they are cut, other dims are cut instead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from torchtp.dtensor.agreed import on_all_parts
from torchtp.dtensor.cut import Placements, axes_of, dim_of, sums_done
from torchtp.dtensor.moving import everywhere, swapped
from torchtp.dtensor.nesting import takes_nested_if
from torchtp.dtensor.registry import bound, named_arguments, spatial_rule
from torchtp.dtensor.rules.adding import scattered_up
from torchtp.dtensor.rules.fallback import has_strided_shard, unruled
from torchtp.dtensor.rules.shape import is_hardly_reduced, other_dims, resized, summed, taken, without
from torchtp.dtensor.sharing import local_as
from torchtp.dtensor.spatial import is_spatial
from torchtp.dtensor.upstream import (
    DeviceMesh,
    DTensor,
    Op,
    Replicate,
    Shard,
    local_of,
    plain_shard,
    spec_of,
)
from torchtp.dtensor.wrapping import wrap, wrap_in_format


@dataclass(frozen=True)
class _Swap:
    """Over a mesh axis: `dim` becomes whole, and `other` is cut in its place."""

    axis: int
    dim: int
    other: int


class Turn:
    """How tensors of one cut are given other cuts, so that `dims` are whole, and what was made of them the old ones.

    Each way a rank sends no more than it holds. Which dims are cut instead, and whether there are such, is decided by the
    global shape, which is the same on all ranks.
    """

    def __init__(self, mesh: DeviceMesh, placements: Placements, shape: torch.Size, dims: set[int]):
        self.mesh = mesh
        self.placements = placements
        self.swaps: list[_Swap] = []
        sizes = axes_of(mesh).sizes
        pieces = [1] * len(shape)
        for axis, placement in enumerate(placements):
            if plain_shard(placement):
                pieces[placement.dim] *= sizes[axis]
        others = [dim for dim in range(len(shape)) if dim not in dims]
        cut = [(axis, place.dim) for axis, place in enumerate(placements) if plain_shard(place) and place.dim in dims]
        self.stays = is_hardly_reduced(shape, dims)  # cut as there, if one row is left
        self.possible = not cut or (bool(others) and len({dim for _, dim in cut}) == len(cut))
        for axis, dim in cut if self.possible else ():
            free = [dim for dim in others if pieces[dim] == 1 and shape[dim] >= sizes[axis]]
            self.stays = self.stays and bool(free)  # what two axes cut lies otherwise than placements say
            other = max(free if self.stays else others, key=lambda dim: shape[dim] / pieces[dim])
            pieces[other] *= sizes[axis]
            self.swaps.append(_Swap(axis, dim, other))
            self.possible = self.possible and shape[other] > 1

    @property
    def turned(self) -> Placements:
        """How tensors are cut there."""
        placements = list(self.placements)
        for swap in self.swaps:
            placements[swap.axis] = Shard(swap.other)
        return tuple(placements)

    def there(self, local: torch.Tensor, shape: torch.Size) -> tuple[torch.Tensor, list[int]]:
        """This rank's part with `dims` whole, of a tensor of global `shape`; and how long the dims cut instead were."""
        extents = []
        for swap in self.swaps:
            extents.append(local.size(swap.other))
            local = swapped(local, self.mesh, swap.axis, swap.dim, shape[swap.dim], swap.other)
        return local, extents

    def back(self, local: torch.Tensor, extents: list[int]) -> tuple[torch.Tensor, Placements]:
        """What was made of such a part, cut as in the beginning; where one row is left of a dim, whole on all ranks, or as it is."""
        placements = list(self.placements)
        for swap, extent in zip(reversed(self.swaps), reversed(extents), strict=True):
            if local.size(swap.dim) > 1:
                local = swapped(local, self.mesh, swap.axis, swap.other, extent, swap.dim)
            elif self.stays:
                placements[swap.axis] = Shard(swap.other)
            else:
                local = everywhere(local.contiguous(), self.mesh, swap.axis, swap.other, extent, 0, extent)
                placements[swap.axis] = Replicate()
        return local, tuple(placements)


@spatial_rule(
    "cumsum", "cumprod", "argmax", "argmin", "max.dim", "min.dim", "sort", "sort.stable",
    "topk", "prod.dim_int", "glu", "median.dim", "logcumsumexp", "cummax", "cummin", "kthvalue",
    "_fft_r2c", "_fft_c2c", "_fft_c2r",
)  # fmt: skip
@takes_nested_if(other_dims)
def along_whole_dim(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Ops along some dims: on parts that have these whole."""
    named = named_arguments(op, args, kwargs)
    tensor, dims = named["self"], named.get("dim")
    if not taken(tensor) or dims is None:
        return unruled(op, args, kwargs)
    local, mesh, placements = summed(tensor)
    dims = {dim_of(dim, tensor.dim()) for dim in ([dims] if isinstance(dims, int) else dims)}
    turn = Turn(mesh, placements, tensor.shape, dims)
    if not turn.possible:
        return unruled(op, args, kwargs)
    part, extents = turn.there(local, tensor.shape)

    def give_back(result: torch.Tensor) -> DTensor:
        shape = _shape_of(result, tensor, dims)
        gone = sorted(dims) if result.dim() < tensor.dim() else []
        for dim in gone:
            result = result.unsqueeze(dim)
        mine, placed = turn.back(result, extents)
        for dim in reversed(gone):
            mine, placed = mine.squeeze(dim), without(placed, dim)
        return wrap(mine, mesh, placed, shape)

    results = _computed(op, part, args, kwargs)
    return give_back(results) if isinstance(results, torch.Tensor) else tuple(map(give_back, results))


def _computed(op: Op, local: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the op gives of this rank's part; of one without elements, too, which Fourier transforms refuse."""
    if local.numel() or not args[0].numel():
        return op(local, *args[1:], **kwargs)
    # Refuses a dtype as ranks with elements do.
    one = op(local.new_zeros([max(1, size) for size in local.shape]), *args[1:], **kwargs)
    if not op._schema.name.startswith("aten::_fft"):
        return op(local, *args[1:], **kwargs)
    return one[tuple(slice(0, 0) if size == 0 else slice(None) for size in local.shape)]


@spatial_rule("glu_backward")
@takes_nested_if(other_dims)
def along_whole_dim_backward(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = [argument.name for argument in op._schema.arguments]
    tensor, dim = args[1], dim_of(args[names.index("dim")], args[1].dim())
    if not taken(tensor):
        return unruled(op, args, kwargs)
    _, mesh, placements = summed(tensor)
    if any(plain_shard(p) and p.dim == dim for p in placements):
        return unruled(op, args, kwargs)
    others = [local_as(arg, mesh, placements) if isinstance(arg, torch.Tensor) else arg for arg in args]
    return wrap(op(*others, **kwargs), mesh, placements, tensor.shape)


def _shape_of(result: torch.Tensor, tensor: DTensor, dims: set[int]) -> torch.Size:
    """The global shape of a result that has `dims` whole, or has them no more."""
    if result.dim() == tensor.dim():
        return torch.Size([result.size(dim) if dim in dims else tensor.size(dim) for dim in range(tensor.dim())])
    return torch.Size([size for dim, size in enumerate(tensor.shape) if dim not in dims])


@spatial_rule("max_unpool2d", "max_unpool3d")
def max_unpool(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Its indices point anywhere into a plane: ranks have whole planes of some channels or images meanwhile."""
    input, indices, sizes, *params = bound(op, args, kwargs)
    dims = set(range(2, input.dim()))
    if not taken(input) or input.dim() != int(op._schema.name[-2]) + 2:
        return unruled(op, args, kwargs)
    local, mesh, placements = summed(input)
    turn = Turn(mesh, placements, input.shape, dims)
    if not turn.possible:
        return unruled(op, args, kwargs)
    planes, extents = turn.there(local, input.shape)
    points, _ = turn.there(local_as(indices, mesh, placements), input.shape)
    shape = torch.Size([*input.shape[:2], *sizes])

    def unpool() -> torch.Tensor:
        return op(planes, points, sizes, *params) if planes.numel() else planes.new_zeros([*planes.shape[:2], *sizes])

    unpooled = on_all_parts(op, planes, unpool, mesh, placements)
    mine, placed = turn.back(unpooled, extents)
    return wrap_in_format(mine, mesh, placed, shape, input if input.dim() == 4 else None)


@spatial_rule("gather", "scatter.src", "scatter.value", "scatter_add", "scatter_.src", "scatter_.value", "scatter_add_")
@takes_nested_if(other_dims)
def indexed_along_whole_dim(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What is picked or put along one dim, where the others agree."""
    values = bound(op, args, kwargs)
    tensor, dim, index = values[0], dim_of(values[1], values[0].dim()), values[2]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    lead = next((t for t in tensors if isinstance(t, DTensor) and is_spatial(t)), None)
    if lead is None:
        return unruled(op, args, kwargs)
    mesh = lead.device_mesh
    placements = sums_done(spec_of(lead).placements)
    cut = [p.dim for p in placements if plain_shard(p)]
    agree = all(t.dim() == lead.dim() and all(t.size(d) == lead.size(d) for d in cut if d != dim) for t in tensors)
    in_place = op._schema.name.endswith("_")
    kept = tensor is lead and spec_of(lead).placements == placements
    if not agree or has_strided_shard(lead) or (in_place and not kept):
        return unruled(op, args, kwargs)
    shape = index.shape if "gather" in op.name() else tensor.shape
    if dim not in cut:
        own = [local_as(v, mesh, placements) if isinstance(v, torch.Tensor) else v for v in args]
        local = on_all_parts(op, own[0], lambda: op(*own, **kwargs), mesh, placements)
        return tensor if in_place else wrap(local, mesh, placements, shape)
    if tensor is not lead and "scatter_add" in op.name():
        summed_up = scattered_up(values[0], dim, index, values[3], in_place)
        if summed_up is not None:
            return summed_up
    turn = Turn(mesh, placements, lead.shape, {dim})
    alike = all(resized(t.shape, dim, 1) == resized(lead.shape, dim, 1) for t in tensors)
    if not alike or not turn.possible or (in_place and tensor.size(dim) == 1):
        return unruled(op, args, kwargs)
    parts: list[Any] = []
    extents: list[int] = []  # the same for all tensors
    for value in args:
        if isinstance(value, torch.Tensor):
            value, extents = turn.there(local_as(value, mesh, placements), value.shape)
        parts.append(value)
    local, placed = turn.back(on_all_parts(op, parts[0], lambda: op(*parts, **kwargs), mesh, placements), extents)
    if in_place:
        local_of(lead).copy_(local)
        return tensor
    return wrap(local, mesh, placed, shape)
