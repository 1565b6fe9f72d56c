"""F.linear of cut DTensors with whole weights: local where the features are whole, which they are made where they are cut; differentiable to any order."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F

from torchtp.dtensor.cut import Placements, cut_locally, full_of, sums_done
from torchtp.dtensor.moving import recut
from torchtp.dtensor.nesting import takes_nested
from torchtp.dtensor.registry import bound, composite_rule, spatial_rule
from torchtp.dtensor.rules.along import Turn
from torchtp.dtensor.rules.fallback import unruled
from torchtp.dtensor.rules.shape import axis_cutting, taken
from torchtp.dtensor.sharing import local_as
from torchtp.dtensor.spatial import arrange, is_marked, is_replicated
from torchtp.dtensor.upstream import DeviceMesh, DTensor, Op, make_spec, spec_of, taken_apart
from torchtp.dtensor.wrapping import Function, on_mesh, parameter_gradient, wrap, wrap_in_format

_OP = torch.ops.aten.linear.default


def _takes(input: Any, weight: Any, bias: Any) -> bool:
    """Ours: an activation of a mesh that cuts images, and parameters that every rank holds whole: a matrix, a row."""
    if not isinstance(input, DTensor) or input.dim() == 0 or not is_marked(input.device_mesh):
        return False
    if weight.dim() != 2 or (bias is not None and bias.dim() != 1):
        return False
    return is_replicated(weight) and is_replicated(bias)


def _turn(input: DTensor) -> Turn | None:
    """How cut features become whole by cutting something else; None where they are whole, or nothing else can be cut."""
    spec, last = spec_of(input), input.dim() - 1
    if axis_cutting(spec.placements, last) is None or not taken(input):
        return None
    turn = Turn(spec.mesh, sums_done(spec.placements), input.shape, {last})
    return turn if turn.possible else None


def _arranged(input: DTensor) -> tuple[torch.Tensor, DeviceMesh, Placements]:
    turn = _turn(input)
    if turn is not None:
        return local_as(input, turn.mesh, turn.turned), turn.mesh, turn.turned
    last = input.dim() - 1
    return arrange(_OP, input, lambda dim: dim < last, nested=True)


@lru_cache(4096)
def _features_first(shape: torch.Size, stride: tuple[int, ...]) -> bool:
    """Whether memory holds all rows of one feature, then of the next: tokens that are a transposed view of one image.

    Asked of the whole: a part of one row tells another order on each rank.
    """
    tensor = torch.empty_strided(shape, stride, device="meta")
    return not tensor.is_contiguous() and tensor.movedim(-1, 0).is_contiguous()


def _local(
    input: DTensor, weight: torch.Tensor, bias: torch.Tensor | None, features_first: bool = False
) -> DTensor:  # fmt: skip
    shape = torch.Size([*input.shape[:-1], weight.size(0)])
    local, mesh, placements = _arranged(input)
    if features_first:  # wanted of products without a bias
        output = (full_of(weight) @ _rows(local).t()).unflatten(1, local.shape[:-1]).movedim(0, -1)
    else:
        output = F.linear(local, full_of(weight), None if bias is None else full_of(bias))
    turn = _turn(input)
    if turn is not None and shape[-1] > 1:
        spec = make_spec(mesh, placements, shape, output.stride(), output.dtype)
        output, placements = recut(output, spec, turn.placements), turn.placements
    return (wrap if features_first else wrap_in_format)(output, mesh, placements, shape)


def _rows(local: torch.Tensor) -> torch.Tensor:
    return local.reshape(math.prod(local.shape[:-1]), local.size(-1))


def _conjugate(tensor: torch.Tensor) -> torch.Tensor:
    """The factor that a derivative multiplies by; of real numbers itself."""
    return tensor.conj().resolve_conj() if tensor.is_complex() else tensor


class Linear(Function):
    """input @ weight.t() + bias; of no bias with the features first in memory where that is wanted."""

    @staticmethod
    def forward(
        ctx: Any, input: DTensor, weight: torch.Tensor, bias: torch.Tensor | None, features_first: bool = False
    ) -> DTensor:  # fmt: skip
        ctx.save_for_backward(input, weight)
        ctx.bias_like = bias
        return _local(input, weight, bias, features_first)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[Any, ...]:
        input, weight = ctx.saved_tensors
        grad, wants = on_mesh(grad, input.device_mesh), ctx.needs_input_grad
        # In the input's own order of memory, as of aten's: ops before it that meet both in two orders take twice as long.
        return (
            Linear.apply(grad, _conjugate(weight.t()), None, _features_first(input.shape, input.stride()))
            if wants[0]
            else None,
            Outer.apply(grad, _conjugate(input), weight) if wants[1] else None,
            Total.apply(grad, ctx.bias_like) if wants[2] else None,
            None,
        )


class Outer(Function):
    """The gradient of a weight: the sum of a.t() @ b over all but the last dim, shared out by the mean rule."""

    @staticmethod
    def forward(ctx: Any, a: DTensor, b: DTensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        local, mesh, placements = _arranged(b)
        share = _rows(local_as(a, mesh, placements)).t() @ _rows(local)
        return parameter_gradient(share, weight, mesh, placements)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        a, b = ctx.saved_tensors
        wants = ctx.needs_input_grad
        return (
            Linear.apply(_conjugate(b), grad, None) if wants[0] else None,
            Linear.apply(_conjugate(a), grad.t(), None) if wants[1] else None,
            None,
        )


class Total(Function):
    """The gradient of a bias: the sum over all but the last dim, shared out by the mean rule."""

    @staticmethod
    def forward(ctx: Any, a: DTensor, bias: torch.Tensor) -> torch.Tensor:
        local, mesh, placements = _arranged(a)
        ctx.like = mesh, placements, a.shape
        return parameter_gradient(_rows(local).sum(0), bias, mesh, placements)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, None]:
        return Spread.apply(grad, *ctx.like), None


class Spread(Function):
    """A bias at every place of a cut tensor."""

    @staticmethod
    def forward(ctx: Any, bias: torch.Tensor, mesh: DeviceMesh, placements: Placements, shape: torch.Size) -> DTensor:
        ctx.save_for_backward(bias)
        ctx.mesh = mesh
        return wrap(cut_locally(full_of(bias).expand(shape), mesh, placements).clone(), mesh, placements, shape)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[Any, ...]:
        (bias,) = ctx.saved_tensors
        return Total.apply(on_mesh(grad, ctx.mesh), bias), None, None, None


@composite_rule("linear")
@takes_nested
def linear(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    input, weight, bias = bound(op, args, kwargs)
    return Linear.apply(input, weight, bias) if _takes(input, weight, bias) else taken_apart(op, args, kwargs)


@spatial_rule("linear")
@takes_nested
def linear_without_autograd(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Inference mode does not take it apart."""
    input, weight, bias = bound(op, args, kwargs)
    return _local(input, weight, bias) if _takes(input, weight, bias) else unruled(op, args, kwargs)
