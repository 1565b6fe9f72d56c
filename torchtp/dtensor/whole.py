"""From a tensor that every rank holds to its parts and back, differentiable to any order (upstream's are not on torch 2.11)."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from torchtp.dtensor.cut import Placements, axes_of, cut_locally, full_of, num_shards, plain_cuts
from torchtp.dtensor.upstream import DeviceMesh, DTensor, Partial, local_of
from torchtp.dtensor.wrapping import Function, dense_stride, on_mesh, wrap


class Cut(Function):
    """This rank's part of what every rank holds, in memory of its own; no communication, its gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, full: torch.Tensor, mesh: DeviceMesh, placements: Placements) -> DTensor:
        ctx.mesh = mesh
        order = dense_format(full)
        part = cut_locally(full, mesh, placements).clone(memory_format=order)
        stride = dense_stride(full.shape, None if order == torch.contiguous_format else full.stride())
        return wrap(part, mesh, placements, full.shape, stride)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[Any, None, None]:
        return Gather.apply(on_mesh(grad, ctx.mesh)), None, None


def _whole_of(tensor: DTensor) -> torch.Tensor:
    """Another tensor object than the DTensor's own, for autograd writes on what a Function returns."""
    whole, own = full_of(tensor), local_of(tensor)
    return whole.view_as(whole) if whole.untyped_storage()._cdata == own.untyped_storage()._cdata else whole


def writable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy if it is a view that a Function has returned: PyTorch refuses to write such a one in place."""
    return tensor.clone() if tensor.requires_grad and tensor._is_view() else tensor


class Gather(Function):
    """The whole on every rank; so is its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor) -> torch.Tensor:
        ctx.mesh = tensor.device_mesh
        ctx.placements = plain_cuts(tensor.placements)
        return _whole_of(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return Cut.apply(grad, ctx.mesh, ctx.placements)


class Whole(Function):
    """The whole of a DTensor, as a plain tensor; its gradient is the mean of what the ranks hand in."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor) -> torch.Tensor:
        ctx.mesh = tensor.device_mesh
        return _whole_of(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return Contributed.apply(grad, ctx.mesh)


def contributed(grad: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """The mean over the ranks of a mesh of what each of them has, still to be summed."""
    placements = (Partial(),) * mesh.ndim
    if grad.layout is not torch.strided:
        grad = grad.to_dense()
    return wrap(grad / num_shards(mesh, placements), mesh, placements, grad.shape)


class Contributed(Function):
    """The same, differentiable."""

    @staticmethod
    def forward(ctx: Any, grad: torch.Tensor, mesh: DeviceMesh) -> DTensor:
        ctx.mesh = mesh
        return contributed(grad, mesh)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[torch.Tensor, None]:
        return Whole.apply(on_mesh(grad, ctx.mesh)), None


def whole_gradient(grad: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The gradient, plain and whole, of what the ranks of a mesh hand out, or of what is still to be summed; differentiable."""
    if grad.layout is not torch.strided:
        return whole_gradient(grad.to_dense(), mesh).to_sparse(layout=grad.layout)
    return Gather.apply(grad) if isinstance(grad, DTensor) else Whole.apply(Contributed.apply(grad, mesh))


class Given(Function):
    """What every rank holds and gives to a computation on cut tensors; its gradient is the mean of what the ranks hand out.

    In memory of its own: a view that a Function returns can't be written in place.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        ctx.mesh = mesh
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return whole_gradient(grad, ctx.mesh), None


_HANDS_IN, _TAKES_PLAIN = "_torchtp_hands_in", "_torchtp_takes_plain"


def hand_in(tensor: DTensor) -> None:
    """Have a DTensor whose values are about to go into a plain tensor take the plain gradient that comes back for them.

    What else comes back is added up with it by the mean rule first, see `pointwise._accumulate`. With grad mode off, what
    has a gradient is written in the forward of a Function of people's own, or one rank alone notes it down.
    """
    if not torch.is_grad_enabled() and not (tensor.requires_grad and _is_in_function()):
        return
    axes_of(tensor.device_mesh).writes_into_plain = True
    if tensor.requires_grad and is_first(tensor, _HANDS_IN):
        node: Any = get_gradient_edge(tensor).node
        node.metadata[_HANDS_IN] = True
    take_plain_gradient(tensor)


def take_plain_gradient(tensor: DTensor) -> None:
    """Have what comes back plain for a DTensor be taken for what ranks contribute: its gradient is the mean of it."""
    mesh = tensor.device_mesh

    def take(grad: torch.Tensor) -> torch.Tensor:
        is_taken = isinstance(grad, DTensor) or grad.layout is not torch.strided  # which hooks have to leave sparse
        return grad if is_taken else Contributed.apply(grad, mesh)

    if tensor.requires_grad and is_first(tensor, _TAKES_PLAIN):
        tensor.register_hook(take)


def was_handed_in(node: Any) -> bool:
    """Whether what that node of autograd made went into a plain tensor."""
    return _HANDS_IN in node.metadata


def _is_in_function() -> bool:
    """Whether the forward of a Function runs on this thread: there forward mode is off as well, under no_grad it is not."""
    return not torch._C._is_fwd_grad_enabled() and not torch.is_inference_mode_enabled()


def is_first(tensor: torch.Tensor, attribute: str) -> bool:
    """Whether the tensor as it is now has no hook that goes by the name of that attribute yet; afterwards it has.

    A copy takes the attribute along, but not the hook; what is written in place leaves its hooks to what it was before.
    """
    mark = id(tensor), 0 if tensor.is_leaf else tensor._version
    if getattr(tensor, attribute, None) == mark:
        return False
    setattr(tensor, attribute, mark)
    return True


def told_format(tensor: torch.Tensor) -> str:
    """For what ranks tell each other of a tensor: they must not hold parts of one in different formats, see docs/design.md, Strides."""
    return "" if dense_format(tensor) == torch.contiguous_format else " in channels_last"


def dense_format(tensor: torch.Tensor) -> torch.memory_format:
    """The memory format in which a copy of a part of `tensor` is dense."""
    for layout, num_dims in ((torch.channels_last, 4), (torch.channels_last_3d, 5)):
        if tensor.dim() == num_dims and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=layout):
            return layout
    return torch.contiguous_format
