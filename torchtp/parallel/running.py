"""Whether a parallelized forward runs on this thread, and what is written meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torchtp.dtensor.registry import words
from torchtp.dtensor.upstream import current_backward, in_backward

_OPERATORS = words("iadd isub imul itruediv idiv ifloordiv imod ipow iand ior ixor ilshift irshift")


class _Run(NamedTuple):
    """A forward that runs."""

    outer: _Run | None
    by: object
    written: set[int]
    backward: int  # that it runs in


class _State(threading.local):
    run: _Run | None = None  # the innermost


_state = _State()


@contextmanager
def running(by: object = None) -> Iterator[set[int]]:
    """Inside, the parameters of prepared modules are Lazy (on this thread). `by` is what runs a forward.

    Gives the addresses of the memory of what is written through them: of parameters and buffers, and of others made of them.
    """
    outer = _state.run
    _state.run = run = _Run(outer, by, set(), current_backward())
    try:
        yield run.written
    finally:
        _state.run = outer


def is_running() -> bool:
    """Whether a parallelized forward, or the recomputation of a piece of one in a backward, runs on this thread."""
    return is_inside() or in_backward()


def is_inside() -> bool:
    """Whether a parallelized forward runs on this thread."""
    return _state.run is not None


def runs(by: object) -> bool:
    """Whether one that runs on this thread is run by that."""
    run = _state.run
    while run is not None and run.by is not by:
        run = run.outer
    return run is not None


def is_recomputing() -> bool:
    """Whether a gradient that the parallelized forward on this thread takes itself runs a piece again, for a checkpoint in or around it."""
    run = _state.run
    return run is not None and current_backward() not in (-1, run.backward)


def written_now() -> set[int] | None:
    """What the `running` around gives, if there is one."""
    return None if _state.run is None else _state.run.written


def writes(func: Callable[..., Any]) -> bool:
    """Whether a function or method of torch writes into its first argument: `add_`, `__setitem__`, `__iadd__`."""
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or (name[2:-2] in _OPERATORS if name.endswith("__") else name.endswith("_"))
