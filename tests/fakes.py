"""Ops of torchtp held against what they say of tensors without data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class Compared(TorchDispatchMode):
    """Has each op of torchtp answer on tensors without data too, and compares."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        expected = None
        if func.namespace == "torchtp" and is_faked(func):
            expected = func(*pytree.tree_map_only(Tensor, _without_data, args), **(kwargs or {}))
            self.seen.add(func.overloadpacket.__name__)
        found = func(*args, **(kwargs or {}))
        if expected is not None:
            assert _facts(found) == _facts(expected), (func, pytree.tree_map_only(Tensor, _facts, args))
        return found


def is_faked(op: Any) -> bool:
    return op.has_kernel_for_dispatch_key(torch._C.DispatchKey.Meta)


def _without_data(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _facts(results: Any) -> list[Any]:
    """As Inductor's code compares them: strides of one row, or of a tensor without elements, say nothing."""
    tensors = [leaf for leaf in pytree.tree_leaves(results) if leaf is not None]
    return [
        (tuple(t.shape), t.dtype, [t.stride(dim) for dim in range(t.dim()) if t.numel() and t.size(dim) > 1])
        for t in tensors
    ]
