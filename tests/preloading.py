"""The variables of the library that the fixture `preloaded` has in every new process."""

from __future__ import annotations

import contextlib
import ctypes


@contextlib.contextmanager
def broken(library, name, value=1):
    """The variable is set in this process until the block ends."""
    variable = ctypes.c_long.in_dll(ctypes.CDLL(library), name)
    variable.value = value
    try:
        yield
    finally:
        variable.value = 0
