"""Calls through which `backward` goes, as it does through Horovod's: with an exchange of its own, which all ranks join."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class _Call(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Callable[..., Any], derivative: Callable[..., Any], *tensors: torch.Tensor) -> Any:
        ctx.derivative = derivative
        return call(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, None, *ctx.derivative(*grads)


def differentiable(call: Callable[..., Any], derivative: Callable[..., Any], *tensors: Any) -> Any:
    """What `call` gives of the tensors; `derivative` makes, of gradients of its results, the list of those of the tensors."""
    if not torch.is_grad_enabled() or not any(
        isinstance(each, torch.Tensor) and each.requires_grad for each in tensors
    ):
        return call(*tensors)
    return _Call.apply(call, derivative, *tensors)
