"""Plain tensors that a forward takes from elsewhere than its arguments and parameters: fast weights kept on modules, templates that are fitted."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_state = threading.local()


@contextmanager
def looking_out() -> Iterator[None]:
    """Around a parallelized forward: what was made before on this thread is from outside."""
    before = getattr(_state, "began", None)
    _state.began = torch._C._autograd._get_sequence_nr()
    try:
        yield
    finally:
        _state.began = before


def is_from_outside(tensor: torch.Tensor) -> bool:
    """Whether a forward runs and did not make this tensor, or it is a leaf, which is no parameter."""
    began = getattr(_state, "began", None)
    if began is None:
        return False
    return tensor.grad_fn is None or tensor.grad_fn._sequence_nr() < began
