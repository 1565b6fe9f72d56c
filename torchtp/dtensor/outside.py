"""Plain tensors from elsewhere than a parallelized forward's arguments and parameters, of which nobody averages the gradients.

A forward takes them from around it: fast weights kept on modules, templates that are fitted. Or they meet what it gave: the
parameters of a loss, of a head behind it.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from torchtp.dtensor.cut import axes_of
from torchtp.dtensor.upstream import DeviceMesh

_state = threading.local()
_backwards: deque[int] = deque(maxlen=256)  # graph tasks in which cut tensors took part: one may run inside another
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


def note_backward() -> None:
    """Call where a derivative of cut tensors is computed."""
    task = torch._C._current_graph_task_id()
    if task != -1 and (not _backwards or _backwards[-1] != task):
        _backwards.append(task)


def is_cut_backward() -> bool:
    """Whether cut tensors have taken part in the backward that runs on this thread: then all ranks of an image run it."""
    return torch._C._current_graph_task_id() in _backwards


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
