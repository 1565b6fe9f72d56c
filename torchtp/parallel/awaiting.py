"""A call at the end of every backward that reaches a parameter: hooks on the parameters, until they are removed."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from torchtp.dtensor.upstream import current_backward


def after_backward(parameters: Iterable[torch.Tensor], call: Callable[[], None]) -> list[RemovableHandle]:
    """Have `call` called once at the end of each backward that gives one of the plain parameters a gradient."""
    queued = -1

    def arrived(_: torch.Tensor) -> None:
        nonlocal queued
        backward = current_backward()
        if queued != backward:
            queued = backward
            torch.autograd.Variable._execution_engine.queue_callback(call)  # type: ignore[attr-defined]

    return [_hooked(parameter, arrived) for parameter in parameters if _may_train(parameter)]


def _may_train(parameter: torch.Tensor) -> bool:
    if isinstance(parameter, DTensor):
        return False
    return parameter.requires_grad or (
        (parameter.is_floating_point() or parameter.is_complex()) and not parameter.is_inference()
    )


def _hooked(parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
    """A frozen parameter takes no hook as it is, but keeps one until it is trained."""
    trained = parameter.requires_grad
    parameter.requires_grad_()
    handle = parameter.register_post_accumulate_grad_hook(hook)
    parameter.requires_grad_(trained)
    return handle
