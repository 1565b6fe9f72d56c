"""What a parallelized forward that takes values out of a DTensor gets, and what its `full_tensor()` and `to_local()` mean for gradients.

PyTorch takes the gradient that comes back to a plain tensor for that of the whole on every rank. Among plain tensors the
mean rule holds instead: a rank's gradient is its contribution, and the gradient is the mean over the ranks.
"""

from __future__ import annotations

import functools
import sys
import warnings
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from torchtp.dtensor import notice
from torchtp.dtensor.cut import full_of
from torchtp.dtensor.notice import running_module
from torchtp.dtensor.spatial import is_marked, on_first_mark
from torchtp.dtensor.whole import Gather, Whole, writable
from torchtp.parallel.running import is_running


class PartWarning(UserWarning):
    """A model works on a rank's part of a cut activation as a plain tensor; gradients of parameters are not exact."""


def _is_recorded(tensor: DTensor) -> bool:
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not tensor.requires_grad:
        return False
    if not is_marked(tensor.device_mesh):
        return False
    caller = sys._getframe(2).f_globals.get("__name__", "")  # which code by `exec` has not
    return not caller.startswith("torch.distributed.")  # derivatives of DTensor itself


def _say_part(tensor: DTensor) -> None:
    where = running_module() or "a parallelized module"
    warnings.warn(
        f"{where} calls to_local() on a tensor of shape {tuple(tensor.shape)}, placed {tensor.placements}: what is computed "
        "of a part is this rank's alone, and gradients of parameters that meet it are sums over the part where the mean "
        "over the ranks is taken; use ops of the DTensor itself or full_tensor(), or say grad_placements= if no parameter "
        "is involved",
        PartWarning,
        stacklevel=4,
    )


def _values(tensor: DTensor, method: str) -> torch.Tensor:
    """What is turned into something else than a tensor: the whole, which every rank gets inside a forward, with notice.

    Elsewhere a single rank may ask, to plot an image, and would wait for the others.
    """
    if not is_marked(tensor.device_mesh):
        return tensor
    if any(not isinstance(placement, Replicate) for placement in tensor.placements):
        if not is_running():
            raise RuntimeError(
                f"{method} takes a whole tensor, but this one of shape {tuple(tensor.shape)} is placed "
                f"{tensor.placements}: call full_tensor() first, on every rank of its mesh, or parallelize with "
                'output="full"'
            )
        notice.gathering(method, tensor.shape, tensor.dtype)
    return full_of(tensor)


def _install() -> None:
    """Have DTensor's methods heed the mean rule while a parallelized forward runs, and give what may be written in place."""
    full_tensor, to_local = DTensor.full_tensor, DTensor.to_local

    @functools.wraps(full_tensor)
    def exact_full_tensor(self: DTensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args or kwargs or not _is_recorded(self):
            return full_tensor(self, *args, **kwargs)
        return writable((Whole if is_running() else Gather).apply(self))

    @functools.wraps(to_local)
    def audible_to_local(self: DTensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not args and not kwargs and is_running() and _is_recorded(self):
            if not any(isinstance(placement, (Shard, Partial)) for placement in self.placements):
                return writable(Whole.apply(self))
            _say_part(self)
        return to_local(self, *args, **kwargs)

    def printable(self: DTensor, spec: str) -> str:
        if spec and self.dim() == 0 and is_marked(self.device_mesh):  # f"{loss:.4f}", which upstream refuses
            return format(self.item(), spec)
        return torch.Tensor.__format__(self, spec)

    def numpy(self: DTensor, *, force: bool = False) -> Any:
        if self.requires_grad and not force:
            raise RuntimeError("numpy() does not take a tensor that requires grad: call detach().numpy()")
        return torch.Tensor.numpy(_values(self, "numpy()"), force=force)

    def tolist(self: DTensor) -> Any:
        return torch.Tensor.tolist(_values(self, "tolist()"))

    def refused(method: str) -> Any:
        def refuse(self: DTensor, *args: Any, **kwargs: Any) -> Any:
            if is_marked(self.device_mesh):
                raise RuntimeError(
                    f"{method} takes memory of the whole tensor, but this one of shape {tuple(self.shape)} is placed "
                    f"{self.placements}: call full_tensor() first, on every rank of its mesh, or to_local() for this rank's part"
                )
            return getattr(torch.Tensor, method)(self, *args, **kwargs)

        return functools.wraps(getattr(torch.Tensor, method))(refuse)

    for method in ("share_memory_", "__dlpack__", "apply_", "map_", "map2_"):
        setattr(DTensor, method, refused(method))
    DTensor.numpy = numpy  # type: ignore[method-assign, assignment]
    DTensor.tolist = tolist  # type: ignore[method-assign, assignment]
    DTensor.__format__ = printable  # type: ignore[method-assign, assignment]
    DTensor.full_tensor = exact_full_tensor  # type: ignore[method-assign]
    DTensor.to_local = audible_to_local  # type: ignore[method-assign]


on_first_mark(_install)
