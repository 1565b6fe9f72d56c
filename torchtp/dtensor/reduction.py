"""Sums, means, variances, extremes and norms of cut DTensors: of the whole tensor, however unevenly it is cut."""

from __future__ import annotations

import math
from typing import Any

import torch

from torchtp.dtensor.cut import Placements, cut_locally, full_of, wrap
from torchtp.dtensor.fallback import has_strided_shard, unruled
from torchtp.dtensor.registry import bound, rule, spatial_rule
from torchtp.dtensor.shape import summed
from torchtp.dtensor.sharing import local_as
from torchtp.dtensor.spatial import is_spatial
from torchtp.dtensor.upstream import (
    DeviceMesh,
    DTensor,
    Op,
    Partial,
    Placement,
    Replicate,
    Shard,
    local_of,
    make_spec,
    passthrough,
    plain_shard,
    redistributed,
    spec_of,
)

aten = torch.ops.aten


def all_reduced(local: torch.Tensor, mesh: DeviceMesh, axes: list[int], reduce_op: str = "sum") -> torch.Tensor:
    """The sum (or what `reduce_op` says) of the local tensors over mesh axes."""
    if not axes:
        return local
    placements = tuple(Partial(reduce_op) if axis in axes else Replicate() for axis in range(mesh.ndim))
    spec = make_spec(mesh, placements, local.shape, local.stride(), local.dtype)
    return redistributed(local, spec, (Replicate(),) * mesh.ndim)


class Reduced:
    """Where a reduction of a cut tensor over `dims` (None or empty: all) leaves things."""

    def __init__(self, tensor: DTensor, dims: Any, keepdim: bool):
        self.local, self.mesh, self.cut = summed(tensor)
        num_dims = tensor.dim()
        if dims is None or dims == []:
            dims = range(num_dims)
        self.dims = sorted({dim % num_dims for dim in ([dims] if isinstance(dims, int) else dims)})
        self.axes = [axis for axis, p in enumerate(self.cut) if plain_shard(p) and p.dim in self.dims]
        self.count = math.prod(tensor.size(dim) for dim in self.dims)
        self.shape = torch.Size(
            [
                1 if dim in self.dims else size
                for dim, size in enumerate(tensor.shape)
                if keepdim or dim not in self.dims
            ]
        )
        self.placements = tuple(self._placement(p, keepdim) for p in self.cut)

    def _placement(self, placement: Placement, keepdim: bool) -> Placement:
        if not plain_shard(placement) or placement.dim in self.dims:
            return Replicate()
        return placement if keepdim else Shard(placement.dim - sum(dim < placement.dim for dim in self.dims))

    def wrap(self, local: torch.Tensor, placements: Placements | None = None) -> DTensor:
        return wrap(local, self.mesh, placements or self.placements, self.shape)

    def total(self, local: torch.Tensor, reduce_op: str = "sum") -> torch.Tensor:
        return all_reduced(local, self.mesh, self.axes, reduce_op)

    @property
    def partial(self) -> Placements:
        return tuple(Partial() if axis in self.axes else p for axis, p in enumerate(self.placements))


def taken(tensor: Any) -> bool:
    return is_spatial(tensor) and not has_strided_shard(tensor)


def wide(dtype: torch.dtype) -> torch.dtype:
    """What 16-bit floats are summed in."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


@spatial_rule("sum.dim_IntList", "sum")
def sum_(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    named = _named(op, args, kwargs)
    tensor, keepdim, dtype = named["self"], bool(named.get("keepdim")), named.get("dtype")
    if not taken(tensor):
        return unruled(op, args, kwargs)
    to = Reduced(tensor, named.get("dim"), keepdim)
    local = aten.sum.dim_IntList(to.local, to.dims, keepdim, dtype=dtype)
    if torch._C._current_graph_task_id() != -1:
        return to.wrap(local, to.partial)  # a parameter's gradient: whoever adds it up, does it once
    return to.wrap(to.total(local))


@spatial_rule("mean.dim", "mean")
def mean_(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    named = _named(op, args, kwargs)
    tensor, keepdim = named["self"], bool(named.get("keepdim"))
    if not taken(tensor):
        return unruled(op, args, kwargs)
    to = Reduced(tensor, named.get("dim"), keepdim)
    dtype = named.get("dtype") or tensor.dtype
    local = aten.sum.dim_IntList(to.local, to.dims, keepdim, dtype=wide(dtype))
    return to.wrap(to.total(local).div(to.count).to(dtype))


def _moments(to: Reduced, correction: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Variance and mean over the dims, these kept."""
    values = to.local.to(wide(to.local.dtype))
    average = to.total(values.sum(to.dims, keepdim=True)).div(to.count)
    squares = to.total((values - average).square().sum(to.dims, keepdim=True))
    return squares.div(max(0.0, to.count - correction)), average


@spatial_rule("var.correction", "std.correction", "var_mean.correction", "std_mean.correction")
def var(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, dims, correction, keepdim = bound(op, args, kwargs)
    if not taken(tensor) or tensor.is_complex():
        return unruled(op, args, kwargs)
    to = Reduced(tensor, dims, keepdim)
    variance, average = _moments(to, 1 if correction is None else correction)
    if "std" in op.name():
        variance = variance.sqrt()
    results = [
        to.wrap((result if keepdim else result.squeeze(to.dims)).to(tensor.dtype)) for result in (variance, average)
    ]
    return tuple(results) if "mean" in op.name() else results[0]


_LOWEST = {"max": "min", "min": "max"}


def _extreme(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], which: str) -> Any:
    named = _named(op, args, kwargs)
    tensor, keepdim = named["self"], bool(named.get("keepdim"))
    if not taken(tensor):
        return unruled(op, args, kwargs)
    to = Reduced(tensor, named.get("dim"), keepdim)
    local = to.local
    if any(local.size(dim) == 0 for dim in to.dims):  # an empty shard: what every other value beats
        sizes = [1 if dim in to.dims else size for dim, size in enumerate(local.shape)]
        local = local.new_full(sizes, _limit(local.dtype, _LOWEST[which]))
    reduce = aten.amax if which == "max" else aten.amin
    narrow = local.to(torch.uint8) if local.dtype is torch.bool else local
    return to.wrap(to.total(reduce(narrow, to.dims, keepdim), which).to(local.dtype))


def _limit(dtype: torch.dtype, which: str) -> float | int | bool:
    if dtype is torch.bool:
        return which == "max"
    if dtype.is_floating_point:
        return math.inf if which == "max" else -math.inf
    return getattr(torch.iinfo(dtype), which)


@spatial_rule("amax", "max.", "any.dim", "any.dims", "any.", "_is_any_true")
def largest(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _extreme(op, _as_bool(op, args), kwargs, "max")


@spatial_rule("amin", "min.", "all.dim", "all.dims", "all.", "_is_all_true")
def smallest(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _extreme(op, _as_bool(op, args), kwargs, "min")


def _as_bool(op: Op, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (args[0].ne(0), *args[1:]) if op._schema.name in ("aten::any", "aten::all") else args


@spatial_rule("linalg_vector_norm", "norm.ScalarOpt_dim", "norm.Scalar")
def vector_norm(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    named = _named(op, args, kwargs)
    tensor, keepdim, dtype = named["self"], bool(named.get("keepdim")), named.get("dtype")
    order = named.get("ord", named.get("p"))
    if not taken(tensor):
        return unruled(op, args, kwargs)
    order = 2.0 if order is None else float(order)
    to = Reduced(tensor, named.get("dim"), keepdim)
    magnitude = to.local.abs().to(dtype or to.local.dtype)
    if math.isinf(order):
        which = "max" if order > 0 else "min"
        return _extreme(aten.amax.default, (abs(tensor), to.dims, keepdim), {}, which)
    if order == 0:
        return to.wrap(to.total((magnitude != 0).to(magnitude.dtype).sum(to.dims, keepdim=keepdim)))
    power = magnitude.to(wide(magnitude.dtype)).pow(order).sum(to.dims, keepdim=keepdim)
    return to.wrap(to.total(power).pow(1 / order).to(magnitude.dtype))


@spatial_rule(
    "cumsum", "cumprod", "argmax", "argmin", "max.dim", "min.dim", "sort", "sort.stable",
    "topk", "prod.dim_int", "glu", "median.dim", "logcumsumexp", "cummax", "cummin", "kthvalue",
)  # fmt: skip
def along_whole_dim(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Ops along one dim: local where that dim is whole."""
    named = _named(op, args, kwargs)
    tensor, dims = named["self"], named.get("dim")
    if not taken(tensor) or dims is None:
        return unruled(op, args, kwargs)
    local, mesh, placements = summed(tensor)
    dims = {dim % tensor.dim() for dim in ([dims] if isinstance(dims, int) else dims)}
    if any(plain_shard(p) and p.dim in dims for p in placements):
        return unruled(op, args, kwargs)
    return _wrapped_like(op(local, *args[1:], **kwargs), tensor, local, dims, mesh, placements)


@spatial_rule("glu_backward")
def along_whole_dim_backward(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = [argument.name for argument in op._schema.arguments]
    tensor, dim = args[1], args[names.index("dim")] % args[1].dim()
    if not taken(tensor):
        return unruled(op, args, kwargs)
    _, mesh, placements = summed(tensor)
    if any(plain_shard(p) and p.dim == dim for p in placements):
        return unruled(op, args, kwargs)
    others = [
        cut_locally(arg, mesh, placements)
        if isinstance(arg, torch.Tensor) and not isinstance(arg, DTensor)
        else redistributed(local_of(arg), spec_of(arg), placements)
        if isinstance(arg, DTensor)
        else arg
        for arg in args
    ]
    return wrap(op(*others, **kwargs), mesh, placements, tensor.shape)


def _wrapped_like(
    results: Any, tensor: DTensor, local: torch.Tensor, dims: set[int], mesh: DeviceMesh, placements: Placements
) -> Any:
    if isinstance(results, (tuple, list)):
        return tuple(_wrapped_like(result, tensor, local, dims, mesh, placements) for result in results)
    if results.dim() == tensor.dim():
        kept = placements
        shape = torch.Size([results.size(d) if d in dims else tensor.size(d) for d in range(tensor.dim())])
    else:
        kept = tuple(Shard(p.dim - len([d for d in dims if d < p.dim])) if plain_shard(p) else p for p in placements)
        shape = torch.Size([size for dim, size in enumerate(tensor.shape) if dim not in dims])
    return wrap(results, mesh, kept, shape)


@spatial_rule("gather", "scatter.src", "scatter.value", "scatter_add", "scatter_.src", "scatter_.value", "scatter_add_")
def indexed_along_whole_dim(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What is picked or put along one dim: local where that dim is whole and the others agree."""
    values = bound(op, args, kwargs)
    tensor, dim, index = values[0], values[1] % max(1, values[0].dim()), values[2]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    lead = next((t for t in tensors if isinstance(t, DTensor) and is_spatial(t)), None)
    if lead is None:
        return unruled(op, args, kwargs)
    mesh = lead.device_mesh
    placements = tuple(Replicate() if isinstance(p, Partial) else p for p in spec_of(lead).placements)
    cut = [p.dim for p in placements if plain_shard(p)]
    agree = all(t.dim() == lead.dim() and all(t.size(d) == lead.size(d) for d in cut) for t in tensors)
    in_place = op._schema.name.endswith("_")
    if dim in cut or not agree or has_strided_shard(lead) or (in_place and tensor is not lead):
        return unruled(op, args, kwargs)
    local = op(*(local_as(v, mesh, placements) if isinstance(v, torch.Tensor) else v for v in args), **kwargs)
    return tensor if in_place else wrap(local, mesh, placements, index.shape if "gather" in op.name() else tensor.shape)


@rule("_local_scalar_dense")
def item(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The value of the whole: upstream gives this rank's part of a sum."""
    tensor = args[0]
    if any(not isinstance(placement, Replicate) for placement in spec_of(tensor).placements):
        return op(full_of(tensor))
    return passthrough(op, args, kwargs)


def _named(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return dict(zip((argument.name for argument in op._schema.arguments), bound(op, args, kwargs), strict=True))
