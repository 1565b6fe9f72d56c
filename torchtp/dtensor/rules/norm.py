"""Batch norm of cut DTensors over all shards, group norm over those of an image."""

from __future__ import annotations

from typing import Any

import torch

from torchtp.dtensor.cut import Placements, axes_of, full_of
from torchtp.dtensor.nesting import takes_nested
from torchtp.dtensor.registry import bound, named_arguments, rule
from torchtp.dtensor.rules.fallback import unruled
from torchtp.dtensor.sharing import hand_out, hand_out_alike, local_as
from torchtp.dtensor.spatial import arrange, is_marked, mark
from torchtp.dtensor.upstream import (
    DeviceMesh,
    DTensor,
    Op,
    Replicate,
    Shard,
    in_backward,
    is_plain,
    local_of,
    plain_shard,
)
from torchtp.dtensor.wrapping import parameter_gradient, wrap

ops = torch.ops.torchtp


def _not_channels(dim: int) -> bool:
    return dim != 1


def _takes(input: Any, weight: Any) -> bool:
    """Ours: a cut input, and what follows one (its weights are as plain as before)."""
    if not isinstance(input, DTensor):
        return False
    if input.dim() >= 3 and any(isinstance(p, Shard) and p.dim >= 2 for p in input.placements):
        return True
    return is_marked(input.device_mesh)


def plain(tensor: Any) -> Any:
    """A parameter as every rank holds it."""
    if not isinstance(tensor, torch.Tensor):
        return tensor
    if not isinstance(tensor, DTensor) and in_backward():
        hand_out(tensor)  # autograd's second derivative is one of DTensors
    return full_of(tensor)


def _groups(mesh: DeviceMesh, placements: Placements) -> list[str]:
    return [name for name, p in zip(axes_of(mesh).groups, placements, strict=True) if plain_shard(p)]


def _mark(mesh: DeviceMesh, placements: Placements) -> None:
    mark(mesh, [axis for axis, p in enumerate(placements) if plain_shard(p) and p.dim >= 2])


def _batch_norm(
    op: Op, input: DTensor, weight: Any, bias: Any, running_mean: Any, running_var: Any, training: bool,
    momentum: Any, eps: Any,
) -> tuple[DTensor, DTensor, DTensor]:  # fmt: skip
    hand_out_alike(op, weight, bias)
    local, mesh, placements = arrange(op, input, _not_channels, nested=True)
    _mark(mesh, placements)
    buffers = [local_of(t) if isinstance(t, DTensor) else t for t in (running_mean, running_var)]
    output, mean, invstd = ops.batch_norm(
        local, plain(weight), plain(bias), *buffers, training, momentum, eps, _groups(mesh, placements)
    )
    whole = (Replicate(),) * mesh.ndim
    return wrap(output, mesh, placements, input.shape), *(wrap(t, mesh, whole, t.shape) for t in (mean, invstd))  # type: ignore[return-value]


@rule("native_batch_norm", "_native_batch_norm_legit.", "_native_batch_norm_legit.no_stats", "cudnn_batch_norm",
      "miopen_batch_norm", "_batch_norm_with_update", "_batch_norm_no_update")  # fmt: skip
@takes_nested
def batch_norm(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    named = named_arguments(op, args, kwargs)
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
@takes_nested
def batch_norm_backward(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    named = named_arguments(op, args, kwargs)
    input, weight = named["input"], named.get("weight")
    if not hasattr(ops, "batch_norm") or not _takes(input, weight):
        return unruled(op, args, kwargs)
    grad_output = named["grad_out" if "grad_out" in named else "grad_output"]
    training = named.get("train", named.get("update", True))
    mask = named.get("output_mask", [True, True, True])
    local, mesh, placements = arrange(op, input, _not_channels, nested=True)
    grads = ops.batch_norm_backward(
        local_as(grad_output, mesh, placements), local, plain(weight), plain(named.get("running_mean")),
        plain(named.get("running_var")), plain(named.get("save_mean")),
        plain(named.get("save_invstd", named.get("save_var"))), training, named.get("eps", named.get("epsilon")), mask,
        _groups(mesh, placements),
    )  # fmt: skip
    return gradients(grads, mask, weight, mesh, placements, input.shape)


def gradients(
    grads: tuple[Any, Any, Any],
    mask: list[bool],
    weight: Any,
    mesh: DeviceMesh,
    placements: Placements,
    shape: torch.Size,
    bias: Any = None,
) -> tuple[Any, Any, Any]:
    """What a rule hands out for input, weight and bias, of local gradients and shares; an unknown bias is as the weight."""
    return (
        wrap(grads[0], mesh, placements, shape) if mask[0] else None,
        parameter_gradient(grads[1], weight, mesh, placements) if mask[1] else None,
        parameter_gradient(grads[2], weight if bias is None else bias, mesh, placements) if mask[2] else None,
    )


@rule("native_group_norm")
@takes_nested
def group_norm(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    input, weight, bias, _, _, _, num_groups, eps = bound(op, args, kwargs)
    if not hasattr(ops, "group_norm") or not _takes(input, weight):
        return unruled(op, args, kwargs)
    hand_out_alike(op, weight, bias)
    local, mesh, placements = arrange(op, input, _not_channels, nested=True)
    _mark(mesh, placements)
    for parameter in (weight, bias):
        if is_plain(parameter):
            hand_out(parameter)  # autograd takes its first derivative apart too, where the second is wanted
    output, mean, rstd = ops.group_norm(
        local, plain(weight), plain(bias), num_groups, eps, _image_groups(mesh, placements)
    )
    kept = _batch_only(placements)
    shape = torch.Size([input.size(0), num_groups])
    return wrap(output, mesh, placements, input.shape), wrap(mean, mesh, kept, shape), wrap(rstd, mesh, kept, shape)


@rule("native_group_norm_backward")
@takes_nested
def group_norm_backward(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grad_output, input, mean, rstd, weight, _, _, _, num_groups, mask = bound(op, args, kwargs)
    if not hasattr(ops, "group_norm") or not _takes(input, weight):
        return unruled(op, args, kwargs)
    local, mesh, placements = arrange(op, input, _not_channels, nested=True)
    kept = _batch_only(placements)
    grads = ops.group_norm_backward(
        local_as(grad_output, mesh, placements), local, plain(weight), local_as(mean, mesh, kept),
        local_as(rstd, mesh, kept), num_groups, mask, _image_groups(mesh, placements),
    )  # fmt: skip
    return gradients(grads, mask, weight, mesh, placements, input.shape)


def _image_groups(mesh: DeviceMesh, placements: Placements) -> list[str]:
    """The groups that hold parts of one image: not those of the batch."""
    return [name for name, p in zip(axes_of(mesh).groups, placements, strict=True) if plain_shard(p) and p.dim > 0]


def _batch_only(placements: Placements) -> Placements:
    return tuple(p if plain_shard(p) and p.dim == 0 else Replicate() for p in placements)
