"""Plain tensors from elsewhere than a parallelized forward's arguments and parameters, of which nobody averages the gradients.

A forward takes them from around it: fast weights kept on modules, templates that are fitted. Or they meet what it gave: the
parameters of a loss, of a head behind it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from torchtp.dtensor.cut import axes_of
from torchtp.dtensor.upstream import DeviceMesh, DTensor, current_backward

_state = threading.local()
# Graph tasks in which cut tensors took part, and their mesh: one may run inside another.
_backwards: dict[int, weakref.ref[DeviceMesh]] = {}
_MOST_BACKWARDS = 256
_averaged: dict[int, tuple[weakref.ref[torch.Tensor], weakref.ref[object]]] = {}  # by id


@contextmanager
def looking_out() -> Iterator[None]:
    """Around a parallelized forward: what was made before on this thread is from outside."""
    before = getattr(_state, "began", None)
    _state.began = torch._C._autograd._get_sequence_nr()
    try:
        yield
    finally:
        _state.began = before


def note_backward(args: Iterable[Any]) -> None:
    """Call where a derivative of cut tensors is computed, with what it is computed of."""
    task = current_backward()
    if task == -1 or task in _backwards:
        return
    for arg in args:
        if isinstance(arg, DTensor):
            if len(_backwards) >= _MOST_BACKWARDS:
                _forget_backwards()
            _backwards[task] = weakref.ref(arg.device_mesh)
            return
        if isinstance(arg, (list, tuple, dict)):
            note_backward(arg.values() if isinstance(arg, dict) else arg)


def _forget_backwards() -> None:
    """The older half."""
    for task in sorted(_backwards)[: _MOST_BACKWARDS // 2]:
        _backwards.pop(task, None)


def is_cut_backward() -> bool:
    """Whether cut tensors have taken part in the backward that runs on this thread: then all ranks of an image run it."""
    return current_backward() in _backwards


def mesh_of_backward(number: int) -> DeviceMesh | None:
    """The mesh of the cut tensors that have taken part in that backward; None if none have."""
    mesh = _backwards.get(number)
    return None if mesh is None else mesh()


def are_averaged(parameters: Iterable[torch.Tensor], by: object) -> None:
    """The gradients of these are averaged in the end as long as `by` lives: a reducer, or what leaves it to its program."""
    averages = weakref.ref(by)
    for parameter in parameters:
        key = id(parameter)
        _averaged[key] = weakref.ref(parameter, partial(_forget, key)), averages


def _forget(key: int, _: object) -> None:
    _averaged.pop(key, None)


def is_averaged(tensor: torch.Tensor) -> bool:
    """Whether `are_averaged` was told of it."""
    known = _averaged.get(id(tensor))
    return known is not None and known[0]() is tensor and known[1]() is not None


def is_from_outside(tensor: torch.Tensor, mesh: DeviceMesh) -> bool:
    """Whether nobody averages what this plain tensor gets: a leaf, or what was made before the forward that runs.

    Where none runs, or for parameters: whether forwards on this mesh average gradients for their program, but not this one's.
    """
    began = getattr(_state, "began", None)
    if tensor.grad_fn is not None:
        return began is not None and tensor.grad_fn._sequence_nr() < began
    if began is not None and not isinstance(tensor, nn.Parameter):
        return True
    return axes_of(mesh).averages and not is_averaged(tensor)
