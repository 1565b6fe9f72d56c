"""Networks without kinks, for what is compared in the rounding of float32.

At a kink of an activation, or where two pixels of a pooling window are nearly equal, the gradient jumps: rounding that turns one number over
moves gradients by a thousandth, on one device as on many, in one run and not in the next. Without kinks only rounding itself is left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


def _smooth(x: Tensor, *args: Any, **options: Any) -> Tensor:
    return F.silu(x)


def _mean(
    x: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    **_: Any,
) -> Tensor:
    """As many rows and columns as the largest of each window; of another dilation the windows are not."""
    if dilation not in (1, (1, 1)):
        raise ValueError(f"max_pool2d: dilation {dilation} has no mean of as many windows")
    return F.avg_pool2d(x, kernel_size, stride, padding, ceil_mode)


_INSTEAD: dict[Callable[..., Any], Callable[..., Tensor]] = {
    **dict.fromkeys((F.relu, torch.relu, Tensor.relu, F.relu6, F.hardtanh, F.hardswish, F.leaky_relu), _smooth),
    F.hardsigmoid: lambda x, *args, **options: F.sigmoid(x),
    F.max_pool2d: _mean,
}


class Smooth(TorchFunctionMode):
    """Calls of torch.nn.functional with kinks go to ones without: activations to `silu`, the largest of a window to the mean."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _INSTEAD.get(function, function)(*args, **(kwargs or {}))
