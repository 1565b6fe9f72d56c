"""Gradients that a parallelized forward takes itself, to go on with them: inner loops of meta-learning, latents fitted to an image.

What autograd gives of a plain tensor is this rank's contribution, by the mean rule. For parameters it is averaged at the
end of a training step; what a forward computes with must be the gradient itself, so here it is averaged at once.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torchtp.dtensor.spatial import on_first_mark
from torchtp.dtensor.whole import Contributed, Gather, Whole

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
    return Whole.apply(Contributed.apply(grad, mesh))


def _hook(mesh: DeviceMesh, grad: torch.Tensor) -> torch.Tensor:
    return Gather.apply(grad) if isinstance(grad, DTensor) else _mean(mesh, grad)


def _leaves(outputs: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The leaves that a backward from there reaches, in an order that is the same on all ranks."""
    found: list[torch.Tensor] = []
    nodes = [torch.autograd.graph.get_gradient_edge(output).node for output in outputs if output.requires_grad]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        for other, _ in node.next_functions:
            if other is not None and other not in seen:
                seen.add(other)
                nodes.append(other)
    return found


def _install() -> None:
    """Both torch.autograd.grad and backward come through here, however a model has imported them."""
    theirs: Callable[..., Any] = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    @functools.wraps(theirs)
    def run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        now = getattr(_forward, "now", None)
        if now is None:
            return theirs(outputs, *args, **kwargs)
        mesh, parameters = now
        if not kwargs.get("accumulate_grad"):
            return tuple(_mean(mesh, grad) for grad in theirs(outputs, *args, **kwargs))
        with ExitStack() as hooks:
            for leaf in _leaves(outputs):
                if id(leaf) not in parameters and not isinstance(leaf, DTensor):
                    hooks.callback(leaf.register_hook(functools.partial(_hook, mesh)).remove)
            return theirs(outputs, *args, **kwargs)

    torch.autograd._engine_run_backward = run_backward  # type: ignore[attr-defined, assignment]


on_first_mark(_install)
