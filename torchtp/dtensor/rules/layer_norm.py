"""Layer norm and root mean square norm of cut DTensors: local over whole dims, statistics of all parts over cut ones."""

from __future__ import annotations

import math
from typing import Any

import torch

from torchtp.dtensor.cut import Placements, axes_of, cut_locally
from torchtp.dtensor.nesting import takes_nested
from torchtp.dtensor.registry import bound, spatial_rule
from torchtp.dtensor.rules.fallback import has_strided_shard, unruled
from torchtp.dtensor.rules.norm import gradients, plain
from torchtp.dtensor.sharing import local_as
from torchtp.dtensor.spatial import arrange, is_marked, is_spatial
from torchtp.dtensor.upstream import DTensor, Op, Replicate, Shard, plain_shard
from torchtp.dtensor.wrapping import parameter_gradient, wrap

ops = torch.ops.torchtp


def _whole_dims(input: Any, weight: Any, normalized_shape: list[int]) -> bool:
    """Ours: a cut input whose normed dims are whole, or plain weights behind one."""
    if not isinstance(input, DTensor) or not is_marked(input.device_mesh):
        return False
    if not is_spatial(input):
        return True
    first = input.dim() - len(normalized_shape)
    return all(not plain_shard(p) or p.dim < first for p in input.placements)


def _check(input: torch.Tensor, normalized_shape: list[int], *parameters: torch.Tensor | None) -> None:
    shape = torch.Size(normalized_shape)
    if not shape or input.shape[-len(shape) :] != shape:
        raise RuntimeError(
            f"layer_norm: normalized_shape={list(shape)} asks for an input of shape [*, {str(list(shape))[1:]}, but it is "
            f"{list(input.shape)}"
        )
    for parameter in parameters:
        if parameter is not None and parameter.shape != shape:
            raise RuntimeError(
                f"layer_norm: weight and bias are of shape {list(shape)}, that of the normed dims, but one is "
                f"{list(parameter.shape)}"
            )


@spatial_rule("native_layer_norm")
@takes_nested
def layer_norm(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    input, normalized_shape, weight, bias, eps = bound(op, args, kwargs)
    _check(input, normalized_shape, weight, bias)
    if _cut_dims(input, normalized_shape):
        return _Norm(op, input, normalized_shape).forward(weight, bias, eps)
    if not _whole_dims(input, weight, normalized_shape):
        return unruled(op, args, kwargs)
    first = input.dim() - len(normalized_shape)
    local, mesh, placements = arrange(op, input, lambda dim: dim < first, nested=True)
    output, mean, rstd = op(local, normalized_shape, plain(weight), plain(bias), eps)
    shape = torch.Size([*input.shape[:first], *[1] * len(normalized_shape)])
    return (
        wrap(output, mesh, placements, input.shape),
        wrap(mean, mesh, placements, shape),
        wrap(rstd, mesh, placements, shape),
    )


@spatial_rule("native_layer_norm_backward")
@takes_nested
def layer_norm_backward(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grad_output, input, normalized_shape, mean, rstd, weight, bias, mask = bound(op, args, kwargs)
    if _cut_dims(input, normalized_shape):
        return _Norm(op, input, normalized_shape).backward(grad_output, mean, rstd, weight, bias, mask)
    if not _whole_dims(input, weight, normalized_shape):
        return unruled(op, args, kwargs)
    first = input.dim() - len(normalized_shape)
    local, mesh, placements = arrange(op, input, lambda dim: dim < first, nested=True)
    grads = op(
        local_as(grad_output, mesh, placements), local, normalized_shape, local_as(mean, mesh, placements),
        local_as(rstd, mesh, placements), plain(weight), plain(bias), mask,
    )  # fmt: skip
    return gradients(grads, mask, weight, mesh, placements, input.shape, bias)


def _cut_dims(input: Any, normalized_shape: list[int]) -> bool:
    """Ours: an input whose normed dims are cut."""
    if not is_spatial(input) or has_strided_shard(input):
        return False
    first = input.dim() - len(normalized_shape)
    return any(plain_shard(p) and p.dim >= first for p in input.placements)


class _Norm:
    """A layer norm over dims that are cut: group norm of one row of groups, one for all that is normed together."""

    def __init__(self, op: Op, input: DTensor, normalized_shape: list[int]):
        local, self.mesh, self.placements = arrange(op, input, lambda dim: True)
        self.shape, self.first = input.shape, input.dim() - len(normalized_shape)
        self.local = local.float() if local.dtype.itemsize == 2 else local
        self.dtype = local.dtype
        self.numbers = math.prod(local.shape[: self.first])
        inside = [plain_shard(p) and p.dim >= self.first for p in self.placements]
        self.groups = [name for name, cut in zip(axes_of(self.mesh).groups, inside, strict=True) if cut]
        self.outer: Placements = tuple(
            Replicate() if cut else p for p, cut in zip(self.placements, inside, strict=True)
        )
        self.inner: Placements = tuple(
            Shard(p.dim - self.first) if plain_shard(p) and cut else Replicate()
            for p, cut in zip(self.placements, inside, strict=True)
        )

    def _row(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.reshape(1, self.numbers, math.prod(self.local.shape[self.first :]))

    def _own(self, parameter: torch.Tensor) -> torch.Tensor:
        return cut_locally(plain(parameter), self.mesh, self.inner).to(self.local.dtype)

    def _statistics(self, numbers: torch.Tensor) -> DTensor:
        normed = [1] * (len(self.shape) - self.first)
        local = numbers.view(*self.local.shape[: self.first], *normed)
        return wrap(local, self.mesh, self.outer, torch.Size([*self.shape[: self.first], *normed]))

    def forward(self, weight: Any, bias: Any, eps: float) -> tuple[DTensor, DTensor, DTensor]:
        if self.numbers == 0:  # on all ranks that share its statistics
            output, mean, rstd = self.local, *(self.local.new_zeros(0) for _ in range(2))
        else:
            row, mean, rstd = ops.group_norm(self._row(self.local), None, None, self.numbers, eps, self.groups)
            output = row.view(self.local.shape)
        if weight is not None:
            output = output * self._own(weight)
        if bias is not None:
            output = output + self._own(bias)
        output = wrap(output.to(self.dtype), self.mesh, self.placements, self.shape)
        return output, self._statistics(mean), self._statistics(rstd)

    def backward(
        self,
        grad_output: torch.Tensor,
        mean: torch.Tensor,
        rstd: torch.Tensor,
        weight: Any,
        bias: Any,
        mask: list[bool],
    ) -> tuple[Any, Any, Any]:
        grad = local_as(grad_output, self.mesh, self.placements).to(self.local.dtype)
        mean, rstd = (local_as(tensor, self.mesh, self.outer) for tensor in (mean, rstd))
        grad_input = self.local
        own = None if weight is None else self._own(weight)  # handed out on all ranks, also where no row is
        if mask[0] and self.numbers:
            grad_input = ops.group_norm_backward(
                self._row(grad if own is None else grad * own), self._row(self.local), None,
                mean.reshape(1, -1), rstd.reshape(1, -1), self.numbers, [True, False, False], self.groups,
            )[0].view(self.local.shape)  # fmt: skip
        return (
            wrap(grad_input.to(self.dtype), self.mesh, self.placements, self.shape) if mask[0] else None,
            self._share((self.local - mean) * rstd * grad, weight) if mask[1] else None,
            self._share(grad, bias) if mask[2] else None,
        )

    def _share(self, each: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        """A parameter's gradient, as large as the parameter: zero where other ranks have the image."""
        share = torch.zeros(parameter.shape, dtype=parameter.dtype, device=each.device)
        cut_locally(share, self.mesh, self.inner).copy_(each.flatten(0, self.first - 1).sum(0) if self.first else each)
        return parameter_gradient(share, parameter, self.mesh, self.placements)


@spatial_rule("_fused_rms_norm")
@takes_nested
def rms_norm(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    input, normalized_shape, weight, eps = bound(op, args, kwargs)
    if not _whole_dims(input, weight, normalized_shape):
        return unruled(op, args, kwargs)
    first = input.dim() - len(normalized_shape)
    local, mesh, placements = arrange(op, input, lambda dim: dim < first, nested=True)
    output, rstd = op(local, normalized_shape, plain(weight), eps)
    shape = torch.Size([*input.shape[:first], *[1] * len(normalized_shape)])
    return wrap(output, mesh, placements, input.shape), wrap(rstd, mesh, placements, shape)


@spatial_rule("_fused_rms_norm_backward")
@takes_nested
def rms_norm_backward(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grad_output, input, normalized_shape, rstd, weight, mask = bound(op, args, kwargs)
    if not _whole_dims(input, weight, normalized_shape):
        return unruled(op, args, kwargs)
    first = input.dim() - len(normalized_shape)
    local, mesh, placements = arrange(op, input, lambda dim: dim < first, nested=True)
    grad_input, grad_weight = op(
        local_as(grad_output, mesh, placements), local, normalized_shape, local_as(rstd, mesh, placements),
        plain(weight), mask,
    )  # fmt: skip
    return (
        wrap(grad_input, mesh, placements, input.shape) if mask[0] else None,
        parameter_gradient(grad_weight, weight, mesh, placements) if mask[1] else None,
    )
