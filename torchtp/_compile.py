"""What torch.compile must know of the ops: those that talk to other ranks are ordered effects.

Else a graph would drop a pull whose rows one rank does not use, or order two of them otherwise than its neighbour, and
the ranks would wait for each other. An op that changes an argument (batch_norm: running statistics) can't be one, and
keeps its place by that. Private names of torch stand only here; the same in 2.11 to 2.15.
"""

from __future__ import annotations

import torch

EFFECTS = (
    "pull",
    "push_add",
    "convolution",
    "convolution_backward",
    "max_pool",
    "max_pool_backward",
    "max_pool_gather",
    "avg_pool",
    "avg_pool_backward",
    "batch_norm_backward",
    "group_norm",
    "group_norm_backward",
    "interpolate",
    "interpolate_backward",
)


def register() -> None:
    """Mark the ops that communicate."""
    # Not at the top: under a torch that is too old, loading the compiled module says so first.
    from torch._higher_order_ops.effects import _register_effectful_op
    from torch._library.effects import EffectType

    for name in EFFECTS:
        _register_effectful_op(getattr(torch.ops.torchtp, name).default, EffectType.ORDERED)
