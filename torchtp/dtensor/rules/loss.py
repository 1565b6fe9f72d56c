"""Losses of cut DTensors: the sum or mean over the whole tensor, replicated; never the mean of means."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from torchtp.dtensor.cut import axes_cutting, cut_locally, cut_of
from torchtp.dtensor.moving import all_reduced
from torchtp.dtensor.nesting import takes_nested
from torchtp.dtensor.registry import bound, composite_rule, rule, spatial_rule
from torchtp.dtensor.rules.counting import Counted
from torchtp.dtensor.rules.fallback import has_strided_shard, unruled
from torchtp.dtensor.rules.pointwise import aligned, broadcast_shapes, common_placements, pointwise
from torchtp.dtensor.rules.reduction import wide
from torchtp.dtensor.sharing import local_as
from torchtp.dtensor.spatial import is_spatial
from torchtp.dtensor.upstream import (
    DeviceMesh,
    DTensor,
    Op,
    Replicate,
    Shard,
    local_of,
    plain_shard,
    redistributed,
    spec_of,
    taken_apart,
)
from torchtp.dtensor.wrapping import wrap

aten = torch.ops.aten
_NONE, _MEAN, _SUM = 0, 1, 2


def _taken(*tensors: Any) -> bool:
    return any(
        is_spatial(tensor)
        or (isinstance(tensor, DTensor) and cut_of(tensor.device_mesh, tensor.placements, tensor.shape) is not None)
        for tensor in tensors
    )


def _whole(tensor: Any) -> Any:
    """The value of a scalar that all ranks hold."""
    if not isinstance(tensor, DTensor):
        return tensor
    return redistributed(local_of(tensor), spec_of(tensor), (Replicate(),) * tensor.device_mesh.ndim)


def _wide(value: Any) -> Any:
    return value.to(wide(value.dtype)) if isinstance(value, torch.Tensor) else value


def _arguments(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], int]:
    """All arguments, and where `reduction` is among them."""
    names = [argument.name for argument in op._schema.arguments]
    return list(bound(op, args, kwargs)), names.index("reduction")


@rule("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits",
      "soft_margin_loss")  # fmt: skip
@takes_nested
def elementwise_loss(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    values, at = _arguments(op, args, kwargs)
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if not _taken(*tensors):
        return unruled(op, args, kwargs)
    reduction = values[at]
    if reduction == _NONE:
        return pointwise(op, tuple(values), {})
    shape = broadcast_shapes(*(tensor.shape for tensor in tensors))
    mesh, placements = common_placements(op, tensors, shape)
    values = [aligned(op, value, shape, mesh, placements) for value in values]
    narrow = any(tensor.dtype != wide(tensor.dtype) for tensor in tensors)
    values[at] = _NONE if narrow else _SUM
    on_cpu = all(tensor.device.type == "cpu" for tensor in tensors)
    refused: RuntimeError | None = None
    try:
        part = op(*values)
    except RuntimeError as error:
        if not on_cpu:
            raise
        # Probabilities that are none, in this rank's part alone, it may be: the others wait for it.
        refused, part = error, torch.zeros((), dtype=tensors[0].dtype)
    dtype = part.dtype
    if narrow:  # as on one device: each element is rounded, a sum that fp16 cannot hold may have a mean that it can
        part = part.sum(dtype=torch.float32)
    if on_cpu:
        part = torch.stack([part, part.new_tensor(float(refused is not None))])
    total = all_reduced(part, mesh, axes_cutting(placements))
    if on_cpu:
        total, num_refused = total.unbind()
        if num_refused:
            raise refused or RuntimeError(f"{op}: another rank that cuts the image refuses the values of its part")
    if reduction == _MEAN:
        total = total / shape.numel()
    return wrap(total.to(dtype), mesh, (Replicate(),) * mesh.ndim, total.shape)


@rule("mse_loss_backward", "smooth_l1_loss_backward", "huber_loss_backward", "binary_cross_entropy_backward",
      "soft_margin_loss_backward")  # fmt: skip
@takes_nested
def elementwise_loss_backward(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    values, at = _arguments(op, args, kwargs)
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if not _taken(*tensors):
        return unruled(op, args, kwargs)
    reduction = values[at]
    if reduction == _NONE:
        return pointwise(op, tuple(values), {})
    shape = broadcast_shapes(*(tensor.shape for tensor in tensors))
    mesh, placements = common_placements(op, tensors, shape)
    each = values[0].dim() > 0  # a second derivative weighs each element
    grad = aligned(op, values[0], shape, mesh, placements) if each else _whole(values[0])
    locals_ = [aligned(op, value, shape, mesh, placements) for value in values[1:]]
    locals_[at - 1] = _SUM
    dtype = locals_[0].dtype
    grad = _wide(grad)  # of an element it is too small for fp16
    result = op(grad / shape.numel() if reduction == _MEAN else grad, *map(_wide, locals_)).to(dtype)
    return wrap(result, mesh, placements, shape)


def _logits(op: Op, logits: Any, target: Any, mesh: DeviceMesh) -> tuple[torch.Tensor, torch.Tensor, tuple[Any, ...]]:
    """Local logits [N, C, ...] with whole channels, local target [N, ...], and how the logits are cut."""
    lead = logits if isinstance(logits, DTensor) else None
    if lead is None or not any(plain_shard(p) for p in spec_of(lead).placements):
        placements: tuple[Any, ...] = tuple(
            Shard(p.dim + 1 if p.dim else 0) if plain_shard(p) else Replicate() for p in spec_of(target).placements
        )
    else:
        placements = tuple(p if plain_shard(p) and p.dim != 1 else Replicate() for p in spec_of(lead).placements)
    for_target = _for_target(placements)
    return local_as(logits, mesh, placements), local_as(target, mesh, for_target), placements


@composite_rule("one_hot")
@takes_nested
def one_hot(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """PyTorch does not look at the classes of a subclass of Tensor, and gives zeros for those that there are not."""
    classes, num_classes = bound(op, args, kwargs)
    if is_spatial(classes) and classes.device.type == "cpu" and classes.numel():
        least, largest = map(int, Counted(classes).range())
        if least < 0 or 0 < num_classes <= largest:
            raise RuntimeError(
                f"one_hot: classes are counted from 0 and smaller than num_classes ({num_classes}), but there are {least} "
                f"to {largest}"
            )
    return taken_apart(op, args, kwargs)


@composite_rule("nll_loss_nd")
@takes_nested
def nll_loss_nd(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """PyTorch lays lines and volumes out as planes, which would move their rows between ranks: here each voxel's class is picked."""
    logits, target, weight, reduction, ignore_index = bound(op, args, kwargs)
    laid_out = logits.dim() == 3 or logits.dim() > 4
    fits = laid_out and target.shape == torch.Size([logits.size(0), *logits.shape[2:]])
    if not fits or not is_spatial(logits) or has_strided_shard(logits):
        return taken_apart(op, args, kwargs)
    _check_nll(logits, target, weight)
    if not isinstance(target, DTensor):
        mesh, placements = logits.device_mesh, _for_target(logits.placements)
        target = wrap(cut_locally(target, mesh, placements), mesh, placements, target.shape)
    counts = target != ignore_index
    classes = target.masked_fill(~counts, 0)
    # A rank alone would refuse them, and the others wait for it.
    if isinstance(classes, DTensor) and classes.device.type == "cpu":
        least, largest = Counted(classes).range()
        if least < 0 or largest >= logits.size(1):
            raise _wrong_target(logits, ignore_index)
    losses = -logits.gather(1, classes.unsqueeze(1)).squeeze(1).masked_fill(~counts, 0)
    weights = counts.to(losses.dtype)
    if weight is not None:
        weights = weights * F.embedding(classes, weight.unsqueeze(1)).squeeze(-1)
    losses = losses * weights
    if reduction == _NONE:
        return losses
    return losses.sum() / weights.sum() if reduction == _MEAN else losses.sum()


def _check_nll(logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None) -> None:
    """Refuses on all ranks what kernels refuse where they have elements: of a rank's part they may have none."""
    if not logits.is_floating_point():
        raise RuntimeError(f"nll_loss: log-probabilities are floating point numbers, but they are of {logits.dtype}")
    if target.dtype not in (torch.int64, torch.uint8):
        raise RuntimeError(f"nll_loss: a target is of torch.int64 or torch.uint8, but it is of {target.dtype}")
    if weight is not None and (weight.shape != (logits.size(1),) or weight.dtype != logits.dtype):
        raise RuntimeError(
            f"nll_loss: the weight has a number of {logits.dtype} for each of {logits.size(1)} classes, but it is of "
            f"shape {tuple(weight.shape)} and {weight.dtype}"
        )


def _wrong_target(logits: torch.Tensor, ignore_index: int) -> IndexError:
    return IndexError(
        f"nll_loss: a target is out of bounds: {logits.size(1)} classes are counted from 0, and ignore_index is "
        f"{ignore_index}"
    )


def _for_target(placements: tuple[Any, ...]) -> tuple[Any, ...]:
    """How a target [N, ...] is cut beside logits [N, C, ...], sums done."""
    return tuple(Shard(p.dim - 1 if p.dim else 0) if plain_shard(p) and p.dim != 1 else Replicate() for p in placements)


@rule("nll_loss2d_forward")
@spatial_rule("nll_loss_forward")
@takes_nested
def nll_loss_forward(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    logits, target, weight, reduction, ignore_index = bound(op, args, kwargs)
    if not _taken(logits, target) or logits.dim() < 2:
        return unruled(op, args, kwargs)
    expected = torch.Size([logits.size(0), *logits.shape[2:]])
    if target.shape != expected:
        raise RuntimeError(
            f"nll_loss: logits of shape {tuple(logits.shape)} ask for a target of shape {tuple(expected)}, but it is "
            f"{tuple(target.shape)}"
        )
    _check_nll(logits, target, weight)
    mesh = (logits if isinstance(logits, DTensor) else target).device_mesh
    local, local_target, placements = _logits(op, logits, target, mesh)
    axes = axes_cutting(placements)
    weight = _whole(weight)
    whole = (Replicate(),) * mesh.ndim
    on_cpu = local.device.type == "cpu"
    error: IndexError | None = None
    output = total = local.new_zeros(())
    try:
        if reduction == _NONE or local.numel():
            output, total = op(local, local_target, weight, reduction and _SUM, ignore_index)
    except IndexError as raised:  # by this rank alone, it may be: the others wait for it
        error = raised
    numbers = [
        *(() if reduction == _NONE else (output, total)),
        *([torch.tensor(float(error is not None))] if on_cpu else ()),
    ]
    if on_cpu:
        numbers = [number.double() for number in numbers]
    sums = all_reduced(torch.stack(numbers), mesh, axes) if numbers else total.new_empty(0)
    if on_cpu and sums[-1]:
        raise _wrong_target(logits, ignore_index) from error
    if reduction == _NONE:
        for_target = _for_target(placements)
        return wrap(output, mesh, for_target, torch.Size([logits.size(0), *logits.shape[2:]])), wrap(
            total, mesh, whole, total.shape
        )
    output = (sums[0] / sums[1] if reduction == _MEAN else sums[0]).to(local.dtype)
    total = sums[1].to(local.dtype)
    return wrap(output, mesh, whole, output.shape), wrap(total, mesh, whole, total.shape)


@rule("nll_loss2d_backward")
@spatial_rule("nll_loss_backward")
@takes_nested
def nll_loss_backward(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grad, logits, target, weight, reduction, ignore_index, total = bound(op, args, kwargs)
    if not _taken(logits, target) or logits.dim() < 2:
        return unruled(op, args, kwargs)
    mesh = (logits if isinstance(logits, DTensor) else target).device_mesh
    local, local_target, placements = _logits(op, logits, target, mesh)
    weight, total = _whole(weight), _whole(total)
    if reduction == _NONE:
        for_target = _for_target(placements)
        grad = local_as(grad, mesh, for_target)
    else:
        grad = _whole(grad)
        if reduction == _MEAN:
            grad, reduction = grad / total, _SUM
    if local.numel():
        result = op(grad, local, local_target, weight, reduction, ignore_index, total)
    else:
        result = torch.zeros_like(local)
    return wrap(result, mesh, placements, logits.shape)
