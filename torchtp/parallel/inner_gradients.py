"""Gradients that a parallelized forward, or a backward, takes itself, to go on with them: inner loops of meta-learning, latents fitted to an image, adjoints.

What autograd gives of a plain tensor is this rank's contribution, by the mean rule. For parameters it is averaged at the
end of a training step; what a forward computes with must be the gradient itself, so here it is averaged at once.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd.graph import GradientEdge
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torchtp._compile import leave_eager
from torchtp.dtensor.spatial import on_first_mark
from torchtp.dtensor.upstream import in_backward
from torchtp.dtensor.whole import Gather, whole_gradient
from torchtp.parallel.captured_gradients import completed, completed_on_tensors, roots

_forward = threading.local()


@contextmanager
def averaged(mesh: DeviceMesh, parameters: Container[int]) -> Iterator[None]:
    """Inside (on this thread), gradients of plain tensors are averaged over the mesh as they are taken.

    But for what backward() accumulates in the parameters of these ids: it is averaged together with the rest of the step.
    """
    before = getattr(_forward, "now", None)
    _forward.now = mesh, parameters
    try:
        yield
    finally:
        _forward.now = before


def _mean(mesh: DeviceMesh, grad: Any) -> Any:
    if isinstance(grad, DTensor) or not isinstance(grad, torch.Tensor) or grad.layout is not torch.strided:
        return grad
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise RuntimeError(
            "torch.func.grad (vjp, jacrev) inside a parallelized forward would give this rank's contribution alone: take the "
            "gradient by torch.autograd.grad(..., create_graph=True)"
        )
    return whole_gradient(grad, mesh)


def _hook(mesh: DeviceMesh, grad: torch.Tensor) -> torch.Tensor:
    return Gather.apply(grad) if isinstance(grad, DTensor) else _mean(mesh, grad)


def _nodes(outputs: Iterable[torch.Tensor | GradientEdge]) -> Iterator[Any]:
    """What a backward from there goes through, in an order that is the same on all ranks."""
    nodes = list(roots(outputs))
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        yield node
        for other, _ in node.next_functions:
            if other is not None and other not in seen:
                seen.add(other)
                nodes.append(other)


def _mesh_of(tensors: Iterable[Any]) -> DeviceMesh | None:
    return next((tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)), None)


def _leaves(outputs: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    leaves = (getattr(node, "variable", None) for node in _nodes(outputs))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _is_of_cut(node: Any) -> bool:
    """Whether a node takes DTensors or gives them: a Function of PyTorch's or of this package's."""
    function = getattr(node, "_forward_cls", None)
    return function is not None and function.__module__.startswith(("torch.distributed.tensor", "torchtp."))


def _refuse_batched(outputs: Iterable[torch.Tensor]) -> None:
    """Raise RuntimeError where a backward that runs for many gradients at once would come to cut tensors."""
    is_batched = (
        torch._C._dispatch_tls_is_dispatch_key_included("VmapMode")
        or torch._C._functorch.peek_interpreter_stack() is not None
    )
    if is_batched and any(_is_of_cut(node) for node in _nodes(outputs)):
        raise RuntimeError(
            "torch.autograd.grad(is_grads_batched=True), vectorize=True and torch.func.vmap can't see through cut tensors, whose "
            "parts are exchanged with other ranks: take one gradient after the other, as is_grads_batched=False does"
        )


def _install() -> None:
    """Both torch.autograd.grad and backward come through here, however a model has imported them."""
    theirs: Callable[..., Any] = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    @functools.wraps(theirs)
    def run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse_batched(outputs)
        now = getattr(_forward, "now", None)
        if not kwargs.get("accumulate_grad") and (now is not None or in_backward()):
            grads = theirs(outputs, *args, **kwargs)
            mesh = _mesh_of((*outputs, *args[0], *grads)) if now is None else now[0]
            return grads if mesh is None else tuple(_mean(mesh, grad) for grad in grads)
        if now is None:
            if kwargs.get("accumulate_grad"):
                with completed_on_tensors(args[3]) if args[3] else nullcontext():
                    return theirs(outputs, *args, **kwargs)
            with completed(outputs, args[3]) as complete:
                grads = theirs(outputs, *args, **kwargs)
            return complete(grads)
        mesh, parameters = now
        with ExitStack() as hooks:
            for leaf in _leaves(outputs):
                if id(leaf) not in parameters and not isinstance(leaf, DTensor):
                    hooks.callback(leaf.register_hook(functools.partial(_hook, mesh)).remove)
            return theirs(outputs, *args, **kwargs)

    torch.autograd._engine_run_backward = run_backward  # type: ignore[attr-defined, assignment]


on_first_mark(_install)
on_first_mark(leave_eager)
