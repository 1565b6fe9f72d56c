"""Gradients of plain tensors that meet cut activations are plain and obey the mean rule, to any order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from torchtp import _C
from torchtp.dtensor.cut import Placements, axes_of, cut_locally, interval
from torchtp.dtensor.moving import recut
from torchtp.dtensor.outside import is_cut_backward, is_from_outside
from torchtp.dtensor.upstream import (
    DeviceMesh,
    DTensor,
    Op,
    Partial,
    Replicate,
    Shard,
    in_backward,
    local_of,
    spec_of,
)
from torchtp.dtensor.whole import Gather, is_first, was_handed_in, whole_gradient
from torchtp.dtensor.wrapping import wrap

_ATTRIBUTE, _LOOKED_AT, _AVERAGES = "_torchtp_hands_out", "_torchtp_looked_at", "_torchtp_averages"
_MOST_NODES = 1000  # of what a tensor was made by that are looked at


def hand_out(tensor: torch.Tensor) -> None:
    """Have a plain tensor that is about to meet a DTensor get a plain gradient, where that is recorded."""
    if not tensor.requires_grad or type(tensor) not in (torch.Tensor, nn.Parameter) or not torch.is_grad_enabled():
        return
    if is_first(tensor, _ATTRIBUTE):
        tensor.register_hook(share_gradient if tensor.is_leaf else _sharing_gradient_of(tensor.grad_fn))


def _goes_to_others(made: torch.Tensor, mesh: DeviceMesh) -> bool:
    """Whether its gradient goes on through hooks, or the backward of a Function that is neither PyTorch's nor this package's, or
    to a leaf from outside.

    Such a one may ask for a gradient's sign or size, which a contribution by the mean rule does not have; or nobody averages.
    """
    if _C.is_hooked(made, _MOST_NODES):
        return True
    return any(
        _is_of_people(node) or (type(node).__name__ == "AccumulateGrad" and is_from_outside(node.variable, mesh))
        for node in _made_by([made.grad_fn], into=_is_of_pytorch)
    )


def _made_by(nodes: Sequence[Any], into: Callable[[Any], bool]) -> Iterator[Any]:
    """The nodes and what they go on to, through those `into` which to look."""
    rest: list[Any] = list(nodes)
    seen: set[Any] = set()
    while rest and len(seen) < _MOST_NODES:
        node = rest.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        if into(node):
            rest += [other for other, _ in node.next_functions]


def _is_of_pytorch(node: Any) -> bool:
    return getattr(node, "_forward_cls", None) is None


def _is_of_people(node: Any) -> bool:
    """Whether it is the backward of a Function that is neither PyTorch's nor this package's."""
    return not _is_of_pytorch(node) and not node._forward_cls.__module__.startswith(("torch.", "torchtp."))


def average_for_others(tensor: torch.Tensor, mesh: DeviceMesh) -> None:
    """Have what comes back for a plain tensor that is about to meet a DTensor be its gradient itself, where others get it.

    That is people's own code, and leaves that nobody averages.
    """
    if not is_from_outside(tensor, mesh) and (
        tensor.is_leaf or not is_first(tensor, _LOOKED_AT) or not _goes_to_others(tensor, mesh)
    ):
        return
    _average(tensor, mesh)


def complete_given(made: torch.Tensor, mesh: DeviceMesh) -> None:
    """Have what comes back for a plain tensor that a forward has made and gives out be its gradient itself.

    So its hooks see that, and `retain_grad` keeps it.
    """
    if made.grad_fn is not None:
        _average(made, mesh)


def _average(tensor: torch.Tensor, mesh: DeviceMesh) -> None:
    if not is_first(tensor, _AVERAGES):
        return
    hooks = tensor._backward_hooks
    before = dict(hooks or {})
    if hooks is not None:
        hooks.clear()
    # A leaf may later be used by one rank alone, which nobody would answer.
    tensor.register_hook(lambda grad: whole_gradient(grad, mesh) if is_cut_backward() else grad)
    if hooks is not None:
        hooks.update(before)  # run as they stand here: what users have hooked sees what ours makes


def local_as(tensor: torch.Tensor, mesh: DeviceMesh, placements: Placements) -> torch.Tensor:
    """This rank's part of `tensor` under `placements`; a plain tensor is what every rank holds."""
    if not isinstance(tensor, DTensor):
        hand_out(tensor)
        return cut_locally(tensor, mesh, placements)
    return recut(local_of(tensor), spec_of(tensor), placements)


def share_gradient(grad: torch.Tensor) -> torch.Tensor:
    """The hook of a leaf: a plain gradient that obeys the mean rule, of a plain one or of a DTensor."""
    return Share.apply(grad) if isinstance(grad, DTensor) else grad


def _sharing_gradient_of(made: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """The hook of a plain tensor that the node `made`; it holds what that one goes on to, not the node that holds it."""
    nodes, may_take_whole = [node for node, _ in made.next_functions], in_backward() or _is_of_people(made)

    def share(grad: torch.Tensor) -> torch.Tensor:
        if (
            isinstance(grad, DTensor)
            and axes_of(grad.device_mesh).writes_into_plain
            and (may_take_whole or _has_cut_values(nodes))
        ):
            return Gather.apply(grad)
        return share_gradient(grad)

    return share


def _has_cut_values(nodes: Sequence[Any]) -> bool:
    """Whether what these nodes made is made of plain tensors with cut values in them: such a one takes its gradient whole.

    The derivatives of such a write are ops on plain gradients and DTensors, and to an op a plain tensor is the same on every rank.
    """
    met = 0
    for node in _made_by(nodes, into=lambda node: True):
        met += 1
        if was_handed_in(node) or _is_of_people(node):
            return True
    return met >= _MOST_NODES


def hand_out_alike(op: Op, weight: Any, bias: Any) -> None:
    """Prepare the parameters of an op whose backward knows of its bias only what its weight is.

    Raises NotImplementedError for a bias that was made of cut activations beside a weight that was not.
    """
    if isinstance(weight, DTensor) and isinstance(bias, torch.Tensor):
        hand_out(bias)
    elif isinstance(bias, DTensor) and bias.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(
            f"{op}: the bias was made of cut activations, the weight was not, and the bias would get a wrong gradient: "
            "add the bias to the output instead"
        )


class Share(torch.autograd.Function):
    """`share_of`. What comes back for it is, as every plain tensor, what all ranks hold."""

    @staticmethod
    def forward(ctx: Any, grad: DTensor) -> torch.Tensor:
        ctx.mesh = grad.device_mesh
        return share_of(grad)

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> Any:
        return Replicated.apply(cotangent, ctx.mesh)


class Replicated(torch.autograd.Function):
    """A plain tensor as a DTensor that every rank holds whole; its gradient obeys the mean rule."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        is_made = not tensor.is_leaf
        has_cut_values = axes_of(mesh).writes_into_plain and (in_backward() or _has_cut_values([tensor.grad_fn]))
        ctx.takes_whole = is_from_outside(tensor, mesh) or (
            is_made and (has_cut_values or _goes_to_others(tensor, mesh))
        )
        return wrap(tensor.detach(), mesh, (Replicate(),) * mesh.ndim, tensor.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.takes_whole and isinstance(grad, DTensor):
            return Gather.apply(grad), None
        if torch.is_grad_enabled() and isinstance(grad, DTensor):  # the second derivative is wanted
            return Share.apply(grad), None
        return torch.ops.torchtp.share(grad), None


def share_of(grad: DTensor) -> torch.Tensor:
    """What a rank hands out, by the mean rule, of the gradient of a tensor that every rank holds: plain, of its shape."""
    local, mesh = local_of(grad), grad.device_mesh
    factor = 1
    whole: torch.Tensor | None = None
    own = [slice(None)] * grad.dim()
    for axis, placement in enumerate(grad.placements):
        if isinstance(placement, Replicate):
            continue
        if isinstance(placement, Partial):
            if placement.reduce_op == "sum":
                factor *= mesh.size(axis)
            elif placement.reduce_op != "avg":  # a mean of local gradients is what the rule asks for
                raise NotImplementedError(f"a gradient placed {placement} can't be shared out among ranks")
            continue
        if type(placement) is not Shard:
            raise NotImplementedError(f"a gradient placed {placement} can't be shared out among ranks")
        factor *= mesh.size(axis)
        own[placement.dim] = slice(*interval(mesh, grad.placements, placement.dim, grad.size(placement.dim)))
        whole = local.new_zeros(grad.shape)
    if whole is not None:
        whole[tuple(own)] = local * factor
        return whole
    return local * factor if factor > 1 else local.clone()


@torch.library.custom_op("torchtp::share", mutates_args=())
def share(grad: torch.Tensor) -> torch.Tensor:
    """What a rank hands out as the gradient of a plain parameter that acted as a replicated DTensor.

    The true gradient is the mean of what the ranks hand out: a partial sum is multiplied by the sizes of the mesh axes
    it is partial over (a cut gradient is one: zero outside the own part), a full gradient goes out as it is.
    """
    return grad.clone()


@share.register_fake
def _(grad: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(grad)


@share.register_torch_dispatch(DTensor)
def _(cls: type, func: Any, types: Any, args: tuple[Any, ...], kwargs: Any) -> torch.Tensor:
    (grad,) = args
    return share_of(grad)
