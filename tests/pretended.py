"""The device of tests/device, as Python needs it."""

from __future__ import annotations

import ctypes
import types

import torch

NAME = "pretended"
DEVICE = "pretended:0"


def load(library: str) -> ctypes.CDLL:
    """Have tensors on `DEVICE`; the library's torchtp_num_launches() counts launches."""
    module = types.ModuleType(f"torch.{NAME}")
    module._lazy_init = lambda: None  # type: ignore[attr-defined]
    module.is_available = lambda: True  # type: ignore[attr-defined]
    module.device_count = lambda: 1  # type: ignore[attr-defined]
    module.current_device = lambda: 0  # type: ignore[attr-defined]
    module._is_in_bad_fork = lambda: False  # type: ignore[attr-defined]
    module.manual_seed_all = lambda seed: None  # type: ignore[attr-defined]
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, module)
    torch.ops.load_library(library)
    loaded = ctypes.CDLL(library)
    loaded.torchtp_num_launches.restype = ctypes.c_int64
    return loaded
