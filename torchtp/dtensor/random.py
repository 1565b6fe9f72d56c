"""Random numbers for cut tensors: drawn for the whole tensor, as a single device would, each rank taking its own part.

So the ranks must draw from the same generator state, which `torchtp.parallelize` sees to. Costs the time and, for the
moment, the memory of drawing the whole tensor.
"""

from __future__ import annotations

from typing import Any

import torch

from torchtp.dtensor.cut import cut_locally, full_of
from torchtp.dtensor.nesting import takes_nested
from torchtp.dtensor.registry import bound, spatial_rule
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
