"""Random numbers for cut tensors: drawn for the whole tensor, as a single device would, each rank taking its own part.

So the ranks must draw from the same generator state, which `torchtp.parallelize` sees to. Costs the time and, for the
moment, the memory of drawing the whole tensor.
"""

from __future__ import annotations

from typing import Any

import torch

from torchtp.dtensor.agreed import on_all_parts
from torchtp.dtensor.cut import cut_locally, full_of
from torchtp.dtensor.nesting import takes_nested
from torchtp.dtensor.registry import bound, spatial_rule
from torchtp.dtensor.rules.fallback import unruled
from torchtp.dtensor.spatial import is_marked, is_spatial
from torchtp.dtensor.upstream import DTensor, Op, Partial, local_of, passthrough, spec_of
from torchtp.dtensor.wrapping import dense_stride, wrap


@spatial_rule(
    "bernoulli_", "uniform_", "normal_", "exponential_", "random_", "cauchy_", "geometric_", "log_normal_",
    "rand_like", "randn_like", "randint_like", "bernoulli.p",
)  # fmt: skip
@takes_nested
def draw(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, *others = args
    if not _is_ours(tensor):
        return passthrough(op, args, kwargs)
    spec, local = spec_of(tensor), local_of(tensor)
    others = [full_of(other) if isinstance(other, torch.Tensor) else other for other in others]
    in_place = op._schema.name.endswith("_")
    if not is_spatial(tensor):
        result = op(local, *others, **kwargs)
        return tensor if in_place else wrap(result, spec.mesh, spec.placements, tensor.shape)
    drawn = cut_locally(op(_whole(tensor), *others, **kwargs), spec.mesh, spec.placements)
    if in_place:
        local.copy_(drawn)
        return tensor
    return wrap(drawn.clone(), spec.mesh, spec.placements, tensor.shape)


@spatial_rule("bernoulli.default", "normal.Tensor_float", "normal.float_Tensor", "normal.Tensor_Tensor")
@takes_nested
def draw_around(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Probabilities, means and deviations of other ranks decide about other elements, not about how many numbers are drawn."""
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    cut = [tensor for tensor in tensors if isinstance(tensor, DTensor) and is_spatial(tensor)]
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    if not cut or not all(map(_is_ours, cut)) or {(t.placements, t.shape) for t in cut} != {(cut[0].placements, shape)}:
        return unruled(op, args, kwargs)
    spec = spec_of(cut[0])
    given = [_in_its_place(arg) if isinstance(arg, DTensor) and is_spatial(arg) else arg for arg in args]
    given = [full_of(arg) if isinstance(arg, torch.Tensor) else arg for arg in given]
    drawn = on_all_parts(op, local_of(cut[0]), lambda: op(*given, **kwargs), spec.mesh, spec.placements)
    return wrap(cut_locally(drawn, spec.mesh, spec.placements).clone(), spec.mesh, spec.placements, shape)


def _in_its_place(tensor: DTensor) -> torch.Tensor:
    """A whole tensor of halves, but for the own part."""
    whole = _whole(tensor).fill_(0.5)
    cut_locally(whole, tensor.device_mesh, tensor.placements).copy_(local_of(tensor))
    return whole


@spatial_rule("native_dropout")
@takes_nested
def native_dropout(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, p, train = bound(op, args, kwargs)
    if not _is_ours(tensor):
        return passthrough(op, args, kwargs)
    spec, local = spec_of(tensor), local_of(tensor)
    if is_spatial(tensor):
        _, mask = op(_whole(tensor).fill_(1), p, train)
        mask = cut_locally(mask, spec.mesh, spec.placements).clone()
        output = (
            torch.ops.aten.native_dropout_backward(local, mask, 0.0 if p == 1 else 1 / (1 - p))
            if train is not False
            else local.clone()
        )
    else:
        output, mask = op(local, p, train)
    shape = tensor.shape
    return wrap(output, spec.mesh, spec.placements, shape), wrap(mask, spec.mesh, spec.placements, shape)


def _is_ours(tensor: object) -> bool:
    """On a mesh that cuts images; a sum that is not done yet is upstream's."""
    return (
        isinstance(tensor, DTensor)
        and is_marked(tensor.device_mesh)
        and not any(isinstance(placement, Partial) for placement in tensor.placements)
    )


def _whole(tensor: DTensor) -> torch.Tensor:
    # Generators fill in the order of memory, which is the same on all ranks.
    local = local_of(tensor)
    return torch.empty_strided(
        tensor.shape, dense_stride(tensor.shape, tensor.stride()), dtype=local.dtype, device=local.device
    )
