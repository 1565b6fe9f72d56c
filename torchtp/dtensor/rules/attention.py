"""F.scaled_dot_product_attention of cut DTensors: each rank attends for its own queries, images or heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from torchtp.dtensor.cut import Placements, full_of, interval, sums_done
from torchtp.dtensor.nesting import takes_nested
from torchtp.dtensor.registry import bound, composite_rule
from torchtp.dtensor.rules.fallback import has_strided_shard
from torchtp.dtensor.sharing import local_as
from torchtp.dtensor.spatial import is_spatial
from torchtp.dtensor.upstream import (
    DeviceMesh,
    DTensor,
    Op,
    Partial,
    Placement,
    Replicate,
    make_spec,
    plain_shard,
    redistributed,
    spec_of,
    taken_apart,
)
from torchtp.dtensor.wrapping import Function, on_mesh, wrap


@dataclass(frozen=True)
class _Plan:
    """How queries and output are cut, how keys and values are, and what their gradients are before they are summed."""

    mesh: DeviceMesh
    query: Placements
    key: Placements
    of_key: Placements
    options: dict[str, Any]  # but for the mask
    causal: bool


def _planned(query: DTensor, key: Any, value: Any, options: dict[str, Any], causal: bool) -> _Plan | None:
    """None where this is not the way."""
    last = query.dim() - 1
    of_query: list[Placement] = []
    of_key: list[Placement] = []
    gradient: list[Placement] = []
    for placement in spec_of(query).placements:
        if not plain_shard(placement) or placement.dim == last:
            of_query.append(Replicate())
            of_key.append(Replicate())
            gradient.append(Replicate())
        elif placement.dim == last - 1:  # each rank has some of the queries, and needs all keys
            of_query.append(placement)
            of_key.append(Replicate())
            gradient.append(Partial())
        elif query.size(placement.dim) == key.size(placement.dim) == value.size(placement.dim):  # none is stretched
            of_query.append(placement)
            of_key.append(placement)
            gradient.append(placement)
        else:
            return None
    if not any(map(plain_shard, of_query)):
        return None
    return _Plan(query.device_mesh, tuple(of_query), tuple(of_key), tuple(gradient), options, causal)


class Attention(Function):
    """Keeps queries, keys and values as they are cut, and attends once more in backward: nothing whole is kept."""

    @staticmethod
    def forward(ctx: Any, query: DTensor, key: DTensor, value: DTensor, mask: Any, plan: _Plan) -> DTensor:
        ctx.save_for_backward(query, key, value)
        ctx.mask, ctx.plan = mask, plan
        output = _attended(plan, _parts(plan, query, key, value), _local_mask(plan, mask, query, key))
        return wrap(output, plan.mesh, plan.query, torch.Size([*query.shape[:-1], value.size(-1)]))

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[Any, ...]:
        query, key, value = ctx.saved_tensors
        plan: _Plan = ctx.plan
        if torch.is_grad_enabled():
            grad = on_mesh(grad, plan.mesh)
            return (*_derivable(plan, (query, key, value), ctx.mask, grad, ctx.needs_input_grad), None, None)
        parts = [part.detach().requires_grad_() for part in _parts(plan, query, key, value)]
        with torch.enable_grad():
            output = _attended(plan, parts, _local_mask(plan, ctx.mask, query, key))
        grads = torch.autograd.grad(output, parts, local_as(grad, plan.mesh, plan.query))
        of_query = wrap(grads[0], plan.mesh, plan.query, query.shape, made_of=[query])
        return (
            of_query,
            *(_of_key(plan, one, like) for one, like in zip(grads[1:], (key, value), strict=True)),
            None,
            None,
        )


def _parts(plan: _Plan, query: DTensor, key: DTensor, value: DTensor) -> list[torch.Tensor]:
    of_key = plan.key
    return [local_as(t, plan.mesh, p) for t, p in ((query, plan.query), (key, of_key), (value, of_key))]


def _of_key(plan: _Plan, grad: torch.Tensor, like: DTensor) -> DTensor:
    """The sum over the ranks of what came from each one's queries, cut as the keys are."""
    wanted = sums_done(spec_of(like).placements)
    now = list(plan.of_key)
    for axis, placement in enumerate(wanted):  # outer cuts first: the sums of inner ones are of parts
        spec = make_spec(plan.mesh, tuple(now), like.shape, grad.stride(), grad.dtype)
        now[axis] = placement
        grad = redistributed(grad, spec, tuple(now))
    return wrap(grad, plan.mesh, wanted, like.shape, made_of=[like])


def _attended(plan: _Plan, parts: list[torch.Tensor], mask: Any) -> torch.Tensor:
    query, key, value = parts
    if query.numel() == 0:  # which kernels refuse
        return (query.sum() + key.sum() + value.sum()) * query.new_zeros([*query.shape[:-1], value.size(-1)])
    return F.scaled_dot_product_attention(query, key, value, mask, **plan.options)


def _local_mask(plan: _Plan, mask: Any, query: DTensor, key: DTensor) -> Any:
    """The part of the mask for this rank's queries; of a causal one the rows from its first query on."""
    full = None if mask is None else full_of(mask)
    rows = (0, query.size(-2))
    for cut in {placement.dim for placement in plan.query if plain_shard(placement)}:
        begin, end = interval(plan.mesh, plan.query, cut, query.size(cut))
        if cut == query.dim() - 2:
            rows = begin, end
        if full is not None:
            dim = cut - query.dim() + full.dim()
            if dim >= 0 and full.size(dim) != 1:
                full = full.narrow(dim, begin, end - begin)
    if not plan.causal:
        return full
    places = torch.arange(max(rows[1], key.size(-2)), device=query.device)
    return places[: key.size(-2)] <= places[rows[0] : rows[1], None]


def _derivable(plan: _Plan, tensors: tuple[Any, ...], mask: Any, grad: DTensor, needed: tuple[bool, ...]) -> list[Any]:
    """The gradients made of ops that can be derived again, as PyTorch's own kernels of attention can't."""
    tensors = tuple(map(torch.ops.aten.alias, tensors))  # keys may be made of queries: not to be derived through here
    wanted = [tensor for tensor, needs in zip(tensors, needed, strict=False) if needs]
    output = _in_steps(tensors, mask, 0.0, plan.causal, plan.options)
    grads = iter(torch.autograd.grad(output, wanted, grad, create_graph=True))
    return [next(grads) if needs else None for needs in needed[:3]]


def _in_steps(tensors: tuple[Any, ...], mask: Any, dropout: float, causal: bool, options: dict[str, Any]) -> Any:
    """By products and a softmax, whose rules share the work where only keys are cut; with dropout, and for learned masks."""
    if mask is not None and mask.dtype == torch.bool:  # which it would add as 0 and 1
        mask = torch.zeros_like(mask, dtype=tensors[0].dtype).masked_fill(~mask, -torch.inf)
    return torch.ops.aten._scaled_dot_product_attention_math(*tensors, mask, dropout, causal, **options)[0]


def _has_images_of(query: torch.Tensor, tensor: torch.Tensor, grouped: bool) -> bool:
    """Whether the output has the images and heads of the queries: nothing of keys or values stretches these."""
    if query.dim() != tensor.dim():
        return False
    return grouped or all(theirs in (mine, 1) for mine, theirs in zip(query.shape[:-2], tensor.shape[:-2], strict=True))


def _fit(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Whether kernels take them; a rank without queries would not hear that they don't."""
    scores = torch.Size([*query.shape[:-1], key.size(-2)])
    fits = query.dtype == key.dtype == value.dtype and query.size(-1) == key.size(-1) and key.size(-2) == value.size(-2)
    return fits and (mask is None or torch.broadcast_shapes(mask.shape, scores) == scores)


@composite_rule("scaled_dot_product_attention")
@takes_nested
def attention(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    query, key, value, mask, dropout, causal, scale, grouped = bound(op, args, kwargs)
    tensors, options = (query, key, value), {"scale": scale, "enable_gqa": grouped}
    if not any(map(is_spatial, tensors)):
        return taken_apart(op, args, kwargs)
    ours = is_spatial(query) and not any(map(has_strided_shard, tensors))
    ours = ours and all(isinstance(t, DTensor) and t.device_mesh == query.device_mesh for t in tensors)
    ours = ours and all(_has_images_of(query, t, grouped) for t in (key, value)) and _fit(*tensors, mask)
    learned = isinstance(mask, torch.Tensor) and mask.requires_grad
    if ours and not dropout and not learned and not (causal and mask is not None):
        plan = _planned(query, key, value, options, causal)
        if plan is not None:
            return Attention.apply(query, key, value, mask, plan)
    return _in_steps(tensors, mask, dropout, causal, options)
