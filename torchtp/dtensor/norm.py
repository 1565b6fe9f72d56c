"""Norms of cut DTensors: batch norm over all shards, group norm over those of an image, layer norm where it is whole."""

from __future__ import annotations

from typing import Any

import torch

from torchtp.dtensor.cut import (
    Placements,
    axes_of,
    cut_of,
    full_of,
    local_as,
    parameter_gradient,
    wrap,
)
from torchtp.dtensor.fallback import unruled
from torchtp.dtensor.registry import bound, rule, spatial_rule
from torchtp.dtensor.spatial import arrange, is_marked, is_spatial, mark
from torchtp.dtensor.upstream import DeviceMesh, DTensor, Op, Replicate, local_of, plain_shard

ops = torch.ops.torchtp


def _not_channels(dim: int) -> bool:
    return dim != 1


def _takes(input: Any, weight: Any) -> bool:
    """Ours: a cut input, and what follows one (its weights are as plain as before)."""
    if not isinstance(input, DTensor):
        return False
    if input.dim() >= 3 and cut_of(input.device_mesh, input.placements, input.shape) is not None:
        return True
    return is_marked(input.device_mesh)


def _plain(tensor: Any) -> Any:
    return full_of(tensor) if isinstance(tensor, torch.Tensor) else tensor


def _groups(mesh: DeviceMesh, placements: Placements) -> list[str]:
    return [name for name, p in zip(axes_of(mesh).groups, placements, strict=True) if plain_shard(p)]


def _mark(mesh: DeviceMesh, placements: Placements) -> None:
    mark(mesh, [axis for axis, p in enumerate(placements) if plain_shard(p) and p.dim >= 2])


def _batch_norm(
    op: Op, input: DTensor, weight: Any, bias: Any, running_mean: Any, running_var: Any, training: bool,
    momentum: Any, eps: Any,
) -> tuple[DTensor, DTensor, DTensor]:  # fmt: skip
    local, mesh, placements = arrange(op, input, _not_channels)
    _mark(mesh, placements)
    buffers = [local_of(t) if isinstance(t, DTensor) else t for t in (running_mean, running_var)]
    output, mean, invstd = ops.batch_norm(
        local, _plain(weight), _plain(bias), *buffers, training, momentum, eps, _groups(mesh, placements)
    )
    whole = (Replicate(),) * mesh.ndim
    return wrap(output, mesh, placements, input.shape), *(wrap(t, mesh, whole, t.shape) for t in (mean, invstd))  # type: ignore[return-value]


@rule("native_batch_norm", "_native_batch_norm_legit.", "_native_batch_norm_legit.no_stats", "cudnn_batch_norm",
      "miopen_batch_norm", "_batch_norm_with_update", "_batch_norm_no_update")  # fmt: skip
def batch_norm(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    named = _named(op, args, kwargs)
    input = named["input"]
    if not hasattr(ops, "batch_norm") or not _takes(input, named.get("weight")):
        return unruled(op, args, kwargs)
    training = named.get("training", named.get("train", "no_update" not in op._schema.name))
    results = _batch_norm(
        op, input, named.get("weight"), named.get("bias"), named.get("running_mean"), named.get("running_var"),
        training, named.get("momentum", named.get("exponential_average_factor")), named.get("eps", named.get("epsilon")),
    )  # fmt: skip
    if len(op._schema.returns) == 3:
        return results
    reserve = torch.empty(0, dtype=torch.uint8, device=results[0].device)  # cuDNN's: ours needs nothing in it
    return *results, wrap(reserve, input.device_mesh, (Replicate(),) * input.device_mesh.ndim, reserve.shape)


@rule("native_batch_norm_backward", "cudnn_batch_norm_backward", "miopen_batch_norm_backward", "batch_norm_backward")
def batch_norm_backward(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    named = _named(op, args, kwargs)
    input, weight = named["input"], named.get("weight")
    if not hasattr(ops, "batch_norm") or not _takes(input, weight):
        return unruled(op, args, kwargs)
    grad_output = named["grad_out" if "grad_out" in named else "grad_output"]
    training = named.get("train", named.get("update", True))
    mask = named.get("output_mask", [True, True, True])
    local, mesh, placements = arrange(op, input, _not_channels)
    grads = ops.batch_norm_backward(
        local_as(grad_output, mesh, placements), local, _plain(weight), _plain(named.get("running_mean")),
        _plain(named.get("running_var")), _plain(named.get("save_mean")),
        _plain(named.get("save_invstd", named.get("save_var"))), training, named.get("eps", named.get("epsilon")), mask,
        _groups(mesh, placements),
    )  # fmt: skip
    return _gradients(grads, mask, weight, mesh, placements, input.shape)


def _gradients(
    grads: tuple[Any, Any, Any],
    mask: list[bool],
    weight: Any,
    mesh: DeviceMesh,
    placements: Placements,
    shape: torch.Size,
) -> tuple[Any, Any, Any]:
    return (
        wrap(grads[0], mesh, placements, shape) if mask[0] else None,
        parameter_gradient(grads[1], weight, mesh, placements) if mask[1] else None,
        parameter_gradient(grads[2], weight, mesh, placements) if mask[2] else None,
    )


def _whole_dims(input: Any, weight: Any, normalized_shape: list[int]) -> bool:
    """Ours: a cut input whose normed dims are whole, or plain weights behind one."""
    if not isinstance(input, DTensor) or not is_marked(input.device_mesh):
        return False
    if not is_spatial(input):
        return True
    first = input.dim() - len(normalized_shape)
    return all(not plain_shard(p) or p.dim < first for p in input.placements)


@spatial_rule("native_layer_norm")
def layer_norm(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    input, normalized_shape, weight, bias, eps = bound(op, args, kwargs)
    if not _whole_dims(input, weight, normalized_shape):
        return unruled(op, args, kwargs)
    first = input.dim() - len(normalized_shape)
    local, mesh, placements = arrange(op, input, lambda dim: dim < first)
    output, mean, rstd = op(local, normalized_shape, _plain(weight), _plain(bias), eps)
    shape = torch.Size([*input.shape[:first], *[1] * len(normalized_shape)])
    return (
        wrap(output, mesh, placements, input.shape),
        wrap(mean, mesh, placements, shape),
        wrap(rstd, mesh, placements, shape),
    )


@spatial_rule("native_layer_norm_backward")
def layer_norm_backward(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grad_output, input, normalized_shape, mean, rstd, weight, bias, mask = bound(op, args, kwargs)
    if not _whole_dims(input, weight, normalized_shape):
        return unruled(op, args, kwargs)
    first = input.dim() - len(normalized_shape)
    local, mesh, placements = arrange(op, input, lambda dim: dim < first)
    grads = op(
        local_as(grad_output, mesh, placements), local, normalized_shape, local_as(mean, mesh, placements),
        local_as(rstd, mesh, placements), _plain(weight), _plain(bias), mask,
    )  # fmt: skip
    return _gradients(grads, mask, weight, mesh, placements, input.shape)


@spatial_rule("_fused_rms_norm")
def rms_norm(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    input, normalized_shape, weight, eps = bound(op, args, kwargs)
    if not _whole_dims(input, weight, normalized_shape):
        return unruled(op, args, kwargs)
    first = input.dim() - len(normalized_shape)
    local, mesh, placements = arrange(op, input, lambda dim: dim < first)
    output, rstd = op(local, normalized_shape, _plain(weight), eps)
    shape = torch.Size([*input.shape[:first], *[1] * len(normalized_shape)])
    return wrap(output, mesh, placements, input.shape), wrap(rstd, mesh, placements, shape)


@spatial_rule("_fused_rms_norm_backward")
def rms_norm_backward(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grad_output, input, normalized_shape, rstd, weight, mask = bound(op, args, kwargs)
    if not _whole_dims(input, weight, normalized_shape):
        return unruled(op, args, kwargs)
    first = input.dim() - len(normalized_shape)
    local, mesh, placements = arrange(op, input, lambda dim: dim < first)
    grad_input, grad_weight = op(
        local_as(grad_output, mesh, placements), local, normalized_shape, local_as(rstd, mesh, placements),
        _plain(weight), mask,
    )  # fmt: skip
    return (
        wrap(grad_input, mesh, placements, input.shape) if mask[0] else None,
        parameter_gradient(grad_weight, weight, mesh, placements) if mask[1] else None,
    )


def _named(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return dict(zip((argument.name for argument in op._schema.arguments), bound(op, args, kwargs), strict=True))


@rule("native_group_norm")
def group_norm(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    input, weight, bias, _, _, _, num_groups, eps = bound(op, args, kwargs)
    if not hasattr(ops, "group_norm") or not _takes(input, weight):
        return unruled(op, args, kwargs)
    local, mesh, placements = arrange(op, input, _not_channels)
    _mark(mesh, placements)
    output, mean, rstd = ops.group_norm(
        local, _plain(weight), _plain(bias), num_groups, eps, _image_groups(mesh, placements)
    )
    kept = _batch_only(placements)
    shape = torch.Size([input.size(0), num_groups])
    return wrap(output, mesh, placements, input.shape), wrap(mean, mesh, kept, shape), wrap(rstd, mesh, kept, shape)


@rule("native_group_norm_backward")
def group_norm_backward(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grad_output, input, mean, rstd, weight, _, _, _, num_groups, mask = bound(op, args, kwargs)
    if not hasattr(ops, "group_norm") or not _takes(input, weight):
        return unruled(op, args, kwargs)
    local, mesh, placements = arrange(op, input, _not_channels)
    kept = _batch_only(placements)
    grads = ops.group_norm_backward(
        local_as(grad_output, mesh, placements), local, _plain(weight), local_as(mean, mesh, kept),
        local_as(rstd, mesh, kept), num_groups, mask, _image_groups(mesh, placements),
    )  # fmt: skip
    return _gradients(grads, mask, weight, mesh, placements, input.shape)


def _image_groups(mesh: DeviceMesh, placements: Placements) -> list[str]:
    """The groups that hold parts of one image: not those of the batch."""
    return [name for name, p in zip(axes_of(mesh).groups, placements, strict=True) if plain_shard(p) and p.dim > 0]


def _batch_only(placements: Placements) -> Placements:
    return tuple(p if plain_shard(p) and p.dim == 0 else Replicate() for p in placements)
