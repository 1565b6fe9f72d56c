"""Who asks for a parallelized module's forward and can't have it: it talks to other ranks, and its tensors have no storage."""

from __future__ import annotations

import torch


def refuse_transforms() -> None:
    """Raise RuntimeError inside torch.export, torch.jit.trace and the transforms of torch.func."""
    if torch.compiler.is_exporting():
        what, remedy = "torch.export", "export the module as it is without parallelize, with its state_dict()"
    elif torch.jit.is_tracing():
        what, remedy = "torch.jit.trace", "trace the module as it is without parallelize, with its state_dict()"
    elif torch._C._functorch.peek_interpreter_stack() is not None:
        what, remedy = "torch.func (grad, vmap, jvp and their kin)", "use backward() or torch.autograd.grad"
    else:
        return
    raise RuntimeError(
        f"{what} can't see through a parallelized module, which exchanges data with other ranks: {remedy}"
    )
