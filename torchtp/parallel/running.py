"""Whether a parallelized forward runs on this thread, and what is written meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torchtp.dtensor.outside import current_backward
from torchtp.dtensor.registry import words
from torchtp.dtensor.upstream import in_backward

_state = threading.local()
_OPERATORS = words("iadd isub imul itruediv idiv ifloordiv imod ipow iand ior ixor ilshift irshift")


@contextmanager
def running() -> Iterator[set[int]]:
    """Inside, the parameters of prepared modules are Lazy (on this thread).

    Gives the addresses of the memory of what is written through them: of parameters and buffers, and of others made of them.
    """
    before = getattr(_state, "depth", 0), getattr(_state, "written", None), getattr(_state, "backward", -1)
    _state.depth, _state.written, _state.backward = before[0] + 1, set(), current_backward()
    try:
        yield _state.written
    finally:
        _state.depth, _state.written, _state.backward = before


def is_running() -> bool:
    """Whether a parallelized forward, or the recomputation of a piece of one in a backward, runs on this thread."""
    return is_inside() or in_backward()


def is_inside() -> bool:
    """Whether a parallelized forward runs on this thread."""
    return getattr(_state, "depth", 0) > 0


def is_recomputing() -> bool:
    """Whether a gradient that the parallelized forward on this thread takes itself runs a piece again, for a checkpoint in or around it."""
    return is_inside() and current_backward() not in (-1, _state.backward)


def written_now() -> set[int] | None:
    """What the `running` around gives, if there is one."""
    written: set[int] | None = getattr(_state, "written", None)
    return written


def writes(func: Callable[..., Any]) -> bool:
    """Whether a function or method of torch writes into its first argument: `add_`, `__setitem__`, `__iadd__`."""
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or (name[2:-2] in _OPERATORS if name.endswith("__") else name.endswith("_"))
