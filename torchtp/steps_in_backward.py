"""Optimizers that `torch.distributed.optim._apply_optimizer_in_backward` has put into backward."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def step_after_reduction(parameters: Iterable[torch.Tensor]) -> None:
    """Have those optimizers step on gradients that are reduced, as DistributedDataParallel does.

    PyTorch's hooks are on the node that accumulates, which runs them before anything is reduced; hooks that are
    registered as post-accumulate hooks of a parameter are held back until then.
    """
    for parameter in parameters:
        if not hasattr(parameter, "_in_backward_optimizers"):
            continue
        from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map as handles

        taken = handles.pop(parameter, [])
        for handle in taken:
            handle.remove()
        if taken:
            parameter.register_post_accumulate_grad_hook(_step)


def _step(parameter: torch.Tensor) -> None:
    for optimizer in parameter._in_backward_optimizers:  # type: ignore[attr-defined]
        optimizer.step()
    parameter.grad = None
