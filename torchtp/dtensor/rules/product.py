"""Matrix products of cut DTensors: each mesh axis cuts the batch, the rows, the columns or the sum, as the factors are cut."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from torchtp.dtensor import notice
from torchtp.dtensor.cut import Placements, axes_of
from torchtp.dtensor.nesting import takes_nested
from torchtp.dtensor.registry import bound, composite_rule, named_arguments, spatial_rule
from torchtp.dtensor.rules.fallback import has_strided_shard, unruled
from torchtp.dtensor.sharing import hand_out, local_as
from torchtp.dtensor.spatial import is_replicated, is_spatial
from torchtp.dtensor.upstream import (
    DTensor,
    Op,
    Partial,
    Placement,
    Replicate,
    Shard,
    in_backward,
    make_spec,
    plain_shard,
    redistributed,
    spec_of,
    taken_apart,
)
from torchtp.dtensor.wrapping import wrap_in_format

aten = torch.ops.aten

# What the dims of the factors and of the product stand for: batch, rows, the sum, columns.
_DIMS = {2: ("mk", "kn", "mn"), 3: ("bmk", "bkn", "bmn")}


def _letters(tensor: DTensor, dims: str) -> list[str]:
    """What each mesh axis cuts of a factor, "" where nothing."""
    return [dims[p.dim] if plain_shard(p) else "" for p in spec_of(tensor).placements]


def _kept(of_a: str, of_b: str, b_is_smaller: bool) -> str:
    """What an axis cuts of the product of two factors that it cuts so: the other factor is taken whole, the smaller one if it may be either."""
    if "b" in (of_a, of_b):
        return "b"
    if of_a == "m" and (of_b != "n" or b_is_smaller):
        return "m"
    return "n" if of_b == "n" else of_a or of_b


def _placed(dims: str, letters: list[str]) -> Placements:
    return tuple(Shard(dims.index(letter)) if letter and letter in dims else Replicate() for letter in letters)


def _check(op: Op, a: torch.Tensor, b: torch.Tensor) -> None:
    """Refuses on all ranks what some would find in their parts of the factors, and others not."""
    if a.dtype != b.dtype:
        raise RuntimeError(f"{op}: both factors have one dtype, but they are of {a.dtype} and {b.dtype}")
    if a.dtype is torch.bool:
        raise RuntimeError(f"{op}: there is no product of truth values: give a.float()")
    if a.dim() != b.dim() or a.shape[:-2] != b.shape[:-2] or a.size(-1) != b.size(-2):
        raise RuntimeError(f"{op}: there is no product of {list(a.shape)} and {list(b.shape)}")


@spatial_rule("bmm.", "mm.")
@takes_nested
def product(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    a, b = bound(op, args, kwargs)
    lead = a if is_spatial(a) else b
    if not is_spatial(lead) or any(has_strided_shard(t) or t.layout is not torch.strided for t in (a, b)):
        return unruled(op, args, kwargs)
    _check(op, a, b)
    mesh = lead.device_mesh
    dims_a, dims_b, dims = _DIMS[a.dim()]
    none = [""] * mesh.ndim
    cut_a = _letters(a, dims_a) if isinstance(a, DTensor) else none
    cut_b = _letters(b, dims_b) if isinstance(b, DTensor) else none
    letters: list[str] = []
    for axis, (of_a, of_b) in enumerate(zip(cut_a, cut_b, strict=True)):
        letter = _kept(of_a, of_b, b.numel() <= a.numel())
        nested = any(cut[axis] == letter and letter in cut[:axis] for cut in (cut_a, cut_b))
        letters.append("" if letter in letters and not nested else letter)
    shape = torch.Size([*a.shape[:-1], b.size(-1)])
    # To bring a factor to every rank is in the nature of the product if it is no larger than the other one or the product.
    usual = max(min(a.numel(), b.numel()), shape.numel())
    sides = ((a, cut_a, dims_a), (b, cut_b, dims_b))
    for axis, letter in enumerate(letters):
        large = any(cut[axis] and letter not in held and tensor.numel() > usual for tensor, cut, held in sides)
        if large and dims_a[0] == "b" and "b" not in letters and a.size(0) % axes_of(mesh).sizes[axis] == 0:
            letters[axis] = "b"
    for tensor, cut, held in sides:
        lost = any(was and not now for was, now in zip(cut, letters, strict=True))
        whole = any(was and now not in held for was, now in zip(cut, letters, strict=True))
        if lost or (whole and tensor.numel() > usual):
            notice.gathering(op, tensor.shape, tensor.dtype)
    local = op(local_as(a, mesh, _placed(dims_a, letters)), local_as(b, mesh, _placed(dims_b, letters)))
    made = tuple(
        Partial() if letter == "k" else place for letter, place in zip(letters, _placed(dims, letters), strict=True)
    )
    constant = dims_a if not any(cut_a) else dims_b if not any(cut_b) else ""
    wanted = _summed(made, shape, a, b, axes_of(mesh).sizes, [dims.index(d) for d in constant if d in "mn"])
    if wanted != made:
        local = redistributed(local, make_spec(mesh, made, shape, local.stride(), local.dtype), wanted)
    return wrap_in_format(local, mesh, wanted, shape)


def _summed(
    made: Placements, shape: torch.Size, a: torch.Tensor, b: torch.Tensor, sizes: tuple[int, ...], constant: list[int]
) -> Placements:
    """Where parts of sums go: one as large as a factor is cut along its longer dim, the gradient of keys say; others become whole.

    What a whole matrix makes of a cut tensor, a transform of its columns say, is cut along the dim that takes the place of
    the summed one: `constant`, where one factor is whole. Derivatives leave small sums to who needs them, as they may
    belong to a parameter.
    """
    placements: list[Placement] = list(made)
    transforms = 2 * shape.numel() >= max(a.numel(), b.numel())
    large = 2 * shape.numel() >= min(a.numel(), b.numel()) and 2 * max(shape[-2:]) >= a.size(-1) and min(shape[-2:]) > 1
    for axis, placement in enumerate(made):
        if not isinstance(placement, Partial):
            continue
        own = [dim for dim in constant if transforms and Shard(dim) not in placements and shape[dim] >= sizes[axis]]
        if own:
            placements[axis] = Shard(own[0])
            continue
        free = [dim for dim in (len(shape) - 2, len(shape) - 1) if Shard(dim) not in placements]
        longer = max(free, key=lambda dim: shape[dim], default=0)
        if free and large and in_backward() and shape[longer] >= sizes[axis]:
            placements[axis] = Shard(longer)
        elif not in_backward():
            placements[axis] = Replicate()
    return tuple(placements)


@spatial_rule("baddbmm.", "addmm.")
@takes_nested
def product_and_sum(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    named = named_arguments(op, args, kwargs)
    summand, a, b = list(named.values())[:3]
    if not (is_spatial(a) or is_spatial(b)) or any(t.layout is not torch.strided for t in (summand, a, b)):
        return unruled(op, args, kwargs)
    hand_out(summand)
    result = aten.bmm(a, b) if a.dim() == 3 else aten.mm(a, b)
    if torch.broadcast_shapes(summand.shape, result.shape) != result.shape:
        raise RuntimeError(f"{op}: a summand of {list(summand.shape)} is larger than the product, {list(result.shape)}")
    alpha, beta = named["alpha"], named["beta"]
    if not (result.is_floating_point() or result.is_complex()):
        alpha, beta = int(alpha), int(beta)  # as one device takes them
    result = result if alpha == 1 else aten.mul(result, alpha)
    return result if beta == 0 else aten.add(result, summand, alpha=beta)


@composite_rule("matmul")
@takes_nested
def matmul(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """With a whole matrix, a weight, on one side the other keeps its dims: folded into two, it would have to be moved."""
    a, b = bound(op, args, kwargs)
    if a.dim() > 2 and b.dim() in (1, 2) and is_spatial(a) and is_replicated(b):
        return F.linear(a, b.t()) if b.dim() == 2 else F.linear(a, b.unsqueeze(0)).squeeze(-1)
    if b.dim() > 2 and a.dim() == 2 and is_spatial(b) and is_replicated(a):
        return F.linear(b.transpose(-2, -1), a).transpose(-2, -1)
    return taken_apart(op, args, kwargs)
