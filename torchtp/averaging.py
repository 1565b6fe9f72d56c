"""Averages p.grad over a group when backward() ends: one message for each dtype, nothing overlapped."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor


class Averaging:
    """Replaces the gradients of `parameters` by their mean over `group`, once for each backward through `watch`ed outputs."""

    def __init__(self, parameters: Iterable[nn.Parameter], group: dist.ProcessGroup, wanted: Callable[[], bool]):
        self._parameters = [p for p in parameters if p.requires_grad and not isinstance(p, DTensor)]
        self._group = group
        self._wanted = wanted
        self._queued = False

    def watch(self, outputs: Iterable[torch.Tensor]) -> None:
        """Notice a backward that reaches one of these outputs."""
        self._queued = False
        for output in outputs:
            if output.requires_grad:
                output.register_hook(self._begin)

    def _begin(self, grad: torch.Tensor) -> None:
        # Outputs belong to the outermost backward; the parameters' own hooks may run in one of a reentrant checkpoint.
        if not self._queued:
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    @torch.no_grad()
    def _finish(self) -> None:
        self._queued = False
        if not self._wanted() or self._group.size() == 1:
            return
        present = torch.tensor([p.grad is not None for p in self._parameters], dtype=torch.uint8)
        present = present.to(self._parameters[0].device)
        dist.all_reduce(present, dist.ReduceOp.MAX, group=self._group)
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for parameter, somewhere in zip(self._parameters, present.tolist(), strict=True):
            if not somewhere:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            by_dtype.setdefault(parameter.grad.dtype, []).append(parameter.grad)
        for grads in by_dtype.values():
            flat = torch.cat([grad.reshape(-1) for grad in grads])
            dist.all_reduce(flat, group=self._group)
            flat /= self._group.size()
            for grad, mean in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(mean.view_as(grad))
