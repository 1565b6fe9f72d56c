"""Gathers are never silent: said once for each op, an error inside `strict()`. Nor is a module that cuts nothing."""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from collections.abc import Callable, Iterator

import torch

from torchtp.dtensor.upstream import Op


class GatherWarning(UserWarning):
    """An op has no rule for a cut tensor: the tensor was gathered, the op computed on the whole of it."""


class UncutWarning(UserWarning):
    """No argument of a parallelized module is an image: every rank computes all of it."""


class GatherError(RuntimeError):
    """A gather inside `strict()`; the same on all ranks, before anything is communicated."""


_lock = threading.Lock()
_strict = 0
_said: set[tuple[str, str]] = set()
_listening = threading.local()

Listener = Callable[[Op | str, torch.Size, torch.dtype], None]


@contextlib.contextmanager
def strict() -> Iterator[None]:
    """Make gathering a cut tensor for an op without a rule a GatherError on all ranks, in all threads of the process."""
    global _strict
    with _lock:
        _strict += 1
    try:
        yield
    finally:
        with _lock:
            _strict -= 1


def is_strict() -> bool:
    """Inside `strict`."""
    return _strict > 0


@contextlib.contextmanager
def told_to(listener: Listener) -> Iterator[None]:
    """Inside, on this thread, `listener` is called for every gather, and nothing is said or raised."""
    before = getattr(_listening, "listener", None)
    _listening.listener = listener
    try:
        yield
    finally:
        _listening.listener = before


def gathering(op: Op | str, shape: torch.Size, dtype: torch.dtype, why: str = "has no rule for a cut tensor") -> None:
    """Say that a tensor of global `shape` is about to be gathered for `op`; raises GatherError inside `strict()`."""
    listener: Listener | None = getattr(_listening, "listener", None)
    if listener is not None:
        listener(op, shape, dtype)
        return
    module = running_module()
    num_bytes = shape.numel() * dtype.itemsize
    where = f" in {module}" if module else ""
    text = f"{op} {why}{where}: gathers {tuple(shape)} of {dtype}, {num_bytes} bytes on every rank"
    if _strict:
        raise GatherError(text + "; cut it yourself, use another op, or leave torchtp.strict()")
    key = (str(op), module)
    with _lock:
        if key in _said:
            return
        _said.add(key)
    warnings.warn(text, GatherWarning, stacklevel=3)


def uncut(module: str, layout: str) -> None:
    """Say that nothing of a call of that class is cut."""
    text = (
        f"no argument of {module} is a tensor of an image's dims or a DTensor, so nothing is cut ({layout}) and every rank "
        "computes all of it: pass images themselves, as [N, C, H, W], or what layout.shard() makes of them"
    )
    warnings.warn(text, UncutWarning, stacklevel=3)


def running_module() -> str:
    """The class of the innermost module whose forward is running on this thread; empty in a backward thread."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "forward":
            module = frame.f_locals.get("self")
            if isinstance(module, torch.nn.Module):
                return type(module).__name__
        frame = frame.f_back  # type: ignore[assignment]
    return ""
