"""Sums, means, variances, extremes and norms of cut DTensors: of the whole tensor, however unevenly it is cut."""

from __future__ import annotations

import math
from typing import Any

import torch

from torchtp.dtensor.agreed import check_fractions
from torchtp.dtensor.cut import Placements, axes_cutting, axes_of, dim_of, full_of, note_taken, sums_done
from torchtp.dtensor.moving import all_reduced, recut
from torchtp.dtensor.nesting import takes_nested
from torchtp.dtensor.registry import bound, named_arguments, rule, spatial_rule
from torchtp.dtensor.rules.fallback import unruled
from torchtp.dtensor.rules.shape import is_hardly_reduced, taken
from torchtp.dtensor.sharing import hand_out, local_as
from torchtp.dtensor.upstream import (
    DTensor,
    Op,
    Partial,
    Placement,
    Replicate,
    Shard,
    in_backward,
    local_of,
    passthrough,
    plain_shard,
    spec_of,
)
from torchtp.dtensor.wrapping import wrap

aten = torch.ops.aten


class Reduced:
    """Where a reduction of a cut tensor over `dims` (None or empty: all) leaves things."""

    def __init__(self, tensor: DTensor, dims: Any, keepdim: bool):
        num_dims = tensor.dim()
        if dims is None or dims == []:
            dims = range(num_dims)
        self.dims = sorted({dim_of(dim, num_dims) for dim in ([dims] if isinstance(dims, int) else dims)})
        elsewhere = _cut_elsewhere(tensor, self.dims)
        self.mesh, self.cut = tensor.device_mesh, elsewhere or sums_done(spec_of(tensor).placements)
        self.local = recut(local_of(tensor), spec_of(tensor), self.cut)
        self.axes = axes_cutting(self.cut, self.dims)
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


def _cut_elsewhere(tensor: DTensor, dims: list[int]) -> Placements | None:
    """How a tensor is cut instead that is hardly reduced over the dim that is cut: every rank would hold the whole result."""
    if not is_hardly_reduced(tensor.shape, dims):
        return None
    placements = sums_done(spec_of(tensor).placements)
    cut = [placement.dim for placement in placements if plain_shard(placement)]
    if cut.count(dims[0]) != 1 or in_backward():
        return None
    axis = next(axis for axis, p in enumerate(placements) if plain_shard(p) and p.dim == dims[0])
    num_ranks = axes_of(tensor.device_mesh).sizes[axis]
    free = [dim for dim in range(tensor.dim() - 1) if dim not in cut and tensor.size(dim) >= num_ranks]
    return (*placements[:axis], Shard(max(free, key=tensor.size)), *placements[axis + 1 :]) if free else None


def wide(dtype: torch.dtype) -> torch.dtype:
    """What 16-bit floats are summed in."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _note_summed(tensor: Any) -> None:
    """Its gradient, a value that is expanded, is to be cut as the tensor is (`expand`)."""
    if isinstance(tensor, DTensor):
        note_taken(tensor)


@spatial_rule("sum.dim_IntList", "sum")
@takes_nested
def sum_(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    named = named_arguments(op, args, kwargs)
    tensor, keepdim, dtype = named["self"], bool(named.get("keepdim")), named.get("dtype")
    _note_summed(tensor)
    if not taken(tensor):
        return unruled(op, args, kwargs)
    to = Reduced(tensor, named.get("dim"), keepdim)
    local = aten.sum.dim_IntList(to.local, to.dims, keepdim, dtype=dtype)
    if in_backward():
        return to.wrap(local, to.partial)  # a parameter's gradient: whoever adds it up, does it once
    return to.wrap(to.total(local))


@spatial_rule("dot", "vdot")
@takes_nested
def dot(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    first, other = bound(op, args, kwargs)
    if not (taken(first) or taken(other)) or first.shape != other.shape or first.dim() != 1:
        return unruled(op, args, kwargs)
    if "vdot" in op.name():
        if not isinstance(first, DTensor):
            hand_out(first)
        first = aten.conj_physical(first)
    return (first * other).sum().to(first.dtype)


@spatial_rule("nansum")
@takes_nested
def nansum(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, dims, keepdim, dtype = bound(op, args, kwargs)
    if not taken(tensor):
        return unruled(op, args, kwargs)
    to = Reduced(tensor, dims, keepdim)
    return to.wrap(to.total(op(to.local, to.dims, keepdim, dtype=dtype)))


@spatial_rule("count_nonzero.dim_IntList", "count_nonzero")
@takes_nested
def count_nonzero(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    named = named_arguments(op, args, kwargs)
    if not taken(named["self"]):
        return unruled(op, args, kwargs)
    to = Reduced(named["self"], named.get("dim"), False)
    return to.wrap(to.total(aten.count_nonzero.dim_IntList(to.local, to.dims)))


@spatial_rule("mean.dim", "mean")
@takes_nested
def mean_(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    named = named_arguments(op, args, kwargs)
    tensor, keepdim = named["self"], bool(named.get("keepdim"))
    _note_summed(tensor)
    if not taken(tensor):
        return unruled(op, args, kwargs)
    to = Reduced(tensor, named.get("dim"), keepdim)
    dtype = named.get("dtype") or tensor.dtype
    if named.get("dtype") is None:
        check_fractions(op, tensor)
    local = aten.sum.dim_IntList(to.local, to.dims, keepdim, dtype=wide(dtype))
    return to.wrap(to.total(local).div(to.count).to(dtype))


def _moments(to: Reduced, correction: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Variance and mean over the dims, these kept."""
    values = to.local.to(wide(to.local.dtype))
    average = to.total(values.sum(to.dims, keepdim=True)).div(to.count)
    squares = to.total((values - average).square().sum(to.dims, keepdim=True))
    return squares.div(max(0.0, to.count - correction)), average


@spatial_rule("var.correction", "std.correction", "var_mean.correction", "std_mean.correction")
@takes_nested
def var(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, dims, correction, keepdim = bound(op, args, kwargs)
    if not taken(tensor) or tensor.is_complex():
        return unruled(op, args, kwargs)
    check_fractions(op, tensor)
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
    named = named_arguments(op, args, kwargs)
    tensor, keepdim = named["self"], bool(named.get("keepdim"))
    if not taken(tensor) or tensor.is_complex():  # which a rank without elements would not refuse
        return unruled(op, args, kwargs)
    to = Reduced(tensor, named.get("dim"), keepdim)
    local = to.local
    if any(local.size(dim) == 0 for dim in to.dims):  # an empty shard: what every other value beats
        sizes = [1 if dim in to.dims else size for dim, size in enumerate(local.shape)]
        local = local.new_full(sizes, _limit(local.dtype, _LOWEST[which]))
    reduce = aten.amax if which == "max" else aten.amin
    narrow = local.to(torch.uint8) if local.dtype is torch.bool else local
    extremes = reduce(narrow, to.dims, keepdim)
    total = _total_with_nan(to, extremes, which) if local.is_floating_point() else to.total(extremes, which)
    return to.wrap(total.to(local.dtype))


def _total_with_nan(to: Reduced, local: torch.Tensor, which: str) -> torch.Tensor:
    """NaN where any rank has it, which the maximum of two numbers is not on every backend."""
    is_nan, sign = local.isnan(), 1 if which == "max" else -1
    numbers = local.masked_fill(is_nan, _limit(local.dtype, _LOWEST[which]))
    numbers, found = to.total(torch.stack([numbers, sign * is_nan.to(local.dtype)]), which)
    return numbers.masked_fill(found != 0, math.nan)


def _limit(dtype: torch.dtype, which: str) -> float | int | bool:
    if dtype is torch.bool:
        return which == "max"
    if dtype.is_floating_point:
        return math.inf if which == "max" else -math.inf
    return getattr(torch.iinfo(dtype), which)


@spatial_rule("amax", "max.")
@takes_nested
def largest(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _extreme(op, args, kwargs, "max")


@spatial_rule("amin", "min.")
@takes_nested
def smallest(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _extreme(op, args, kwargs, "min")


@spatial_rule("any.dim", "any.dims", "any.", "_is_any_true")
@takes_nested
def any_(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _truth(op, args, kwargs, "max")


@spatial_rule("all.dim", "all.dims", "all.", "_is_all_true")
@takes_nested
def all_(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _truth(op, args, kwargs, "min")


def _truth(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], which: str) -> Any:
    tensor, *others = args
    truth = tensor.ne(0)
    if not (others and others[0] == []):  # over no dim: of each element
        truth = _extreme(op, (truth, *others), kwargs, which)
    return truth.to(torch.uint8) if tensor.dtype is torch.uint8 else truth  # PyTorch has it so, of bytes alone


@spatial_rule("aminmax")
@takes_nested
def both_extremes(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What observers of quantization ask of every activation."""
    if not taken(args[0]):
        return unruled(op, args, kwargs)
    return _extreme(op, args, kwargs, "min"), _extreme(op, args, kwargs, "max")


@spatial_rule("linalg_vector_norm", "norm.ScalarOpt_dim", "norm.Scalar")
@takes_nested
def vector_norm(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    named = named_arguments(op, args, kwargs)
    tensor, keepdim, dtype = named["self"], bool(named.get("keepdim")), named.get("dtype")
    order = named.get("ord", named.get("p"))
    if not taken(tensor):
        return unruled(op, args, kwargs)
    check_fractions(op, tensor)
    order = 2.0 if order is None else float(order)
    to = Reduced(tensor, named.get("dim"), keepdim)
    dtype = dtype.to_real() if dtype is not None else None
    if math.isinf(order):
        which = "max" if order > 0 else "min"
        largest = _extreme(aten.amax.default, (abs(tensor), to.dims, keepdim), {}, which)
        return largest if dtype is None else largest.to(dtype)
    magnitude = to.local.abs()
    magnitude = magnitude if dtype is None else magnitude.to(dtype)
    if order == 0:
        return to.wrap(to.total((magnitude != 0).to(magnitude.dtype).sum(to.dims, keepdim=keepdim)))
    power = magnitude.to(wide(magnitude.dtype)).pow(order).sum(to.dims, keepdim=keepdim)
    return to.wrap(to.total(power).pow(1 / order).to(magnitude.dtype))


@spatial_rule("equal")
@takes_nested
def equal(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Whether two tensors are, as loops ask that run until nothing changes: all ranks hear the same."""
    tensors = bound(op, args, kwargs)
    lead = next((tensor for tensor in tensors if isinstance(tensor, DTensor)), None)
    if tensors[0].shape != tensors[1].shape:
        return False
    if lead is None or not taken(lead) or lead.is_meta:
        return unruled(op, args, kwargs)
    placements = sums_done(spec_of(lead).placements)
    mine, other = (local_as(tensor.detach(), lead.device_mesh, placements) for tensor in tensors)
    same = torch.tensor(op(mine, other), dtype=torch.uint8, device=mine.device)
    return bool(all_reduced(same, lead.device_mesh, axes_cutting(placements), "min"))


@rule("_local_scalar_dense")
@takes_nested
def item(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The value of the whole: upstream gives this rank's part of a sum."""
    tensor = args[0]
    if any(not isinstance(placement, Replicate) for placement in spec_of(tensor).placements):
        return op(full_of(tensor))
    return passthrough(op, args, kwargs)
