"""Distances between the rows of two matrices (torch.cdist): each mesh axis cuts the batch, or the rows of one of them."""

from __future__ import annotations

from typing import Any

import torch

from torchtp.dtensor import notice
from torchtp.dtensor.cut import Placements, plain_cuts
from torchtp.dtensor.moving import gathers
from torchtp.dtensor.nesting import takes_nested
from torchtp.dtensor.registry import bound, spatial_rule
from torchtp.dtensor.rules.fallback import has_strided_shard, unruled
from torchtp.dtensor.sharing import local_as
from torchtp.dtensor.spatial import is_spatial
from torchtp.dtensor.upstream import DTensor, Op, Partial, Replicate, Shard, plain_shard, spec_of
from torchtp.dtensor.wrapping import wrap


def _sides(placements: Placements, num_dims: int) -> tuple[Placements, Placements]:
    """How the two are cut whose distances are cut so, or whole."""
    rows, columns = Shard(num_dims - 2), Shard(num_dims - 1)
    first = tuple(Replicate() if p == columns else p for p in placements)
    second = tuple(Replicate() if p == rows else rows if p == columns else p for p in placements)
    return first, second


@spatial_rule("_euclidean_dist", "_cdist_forward")
@takes_nested
def distances(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The one that is not larger is taken whole where both have their rows cut."""
    a, b, *others = bound(op, args, kwargs)
    lead = a if is_spatial(a) and (not is_spatial(b) or a.numel() >= b.numel()) else b
    other = b if lead is a else a
    if not is_spatial(lead) or a.shape[:-2] != b.shape[:-2] or any(map(has_strided_shard, (a, b))):
        return unruled(op, args, kwargs)
    num_dims = a.dim()
    held = {p.dim for p in lead.placements if plain_shard(p)}
    if num_dims - 1 in held:
        return unruled(op, args, kwargs)
    rows, columns = Shard(num_dims - 2), Shard(num_dims - 1)
    placements = tuple(
        (columns if lead is b and p == rows else p) if plain_shard(p) else Replicate() for p in lead.placements
    )
    first, second = _sides(placements, num_dims)
    shape = torch.Size([*a.shape[:-1], b.size(-2)])
    is_large = isinstance(other, DTensor) and other.numel() > shape.numel()
    if is_large and gathers(spec_of(other).placements, second if other is b else first):
        notice.gathering(op, other.shape, other.dtype)
    local = op(local_as(a, lead.device_mesh, first), local_as(b, lead.device_mesh, second), *others)
    return wrap(local, lead.device_mesh, placements, shape)


@spatial_rule("_cdist_backward")
@takes_nested
def distances_backward(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The gradient of the first one; of whose rows are whole and the other's cut, a share of it."""
    grad, a, b, p, result = bound(op, args, kwargs)
    lead = result if is_spatial(result) else grad
    if not is_spatial(lead) or a.shape[:-2] != b.shape[:-2] or has_strided_shard(lead):
        return unruled(op, args, kwargs)
    mesh, columns = lead.device_mesh, Shard(a.dim() - 1)
    placements = plain_cuts(lead.placements)
    first, second = _sides(placements, a.dim())
    of_pairs = [local_as(each, mesh, placements).contiguous() for each in (grad, result)]
    local = op(
        of_pairs[0], local_as(a, mesh, first).contiguous(), local_as(b, mesh, second).contiguous(), p, of_pairs[1]
    )
    made = tuple(Partial() if place == columns else place for place in placements)
    return wrap(local, mesh, made, a.shape)
