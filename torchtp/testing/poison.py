"""Uninitialised memory that is seen where it is read."""

from __future__ import annotations

import warnings

import torch


def poison_empty() -> None:
    """Fill every new uninitialised tensor of this process, C++ ones too, with NaN (integers: their maximum)."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    warnings.filterwarnings("ignore", message=".*does not have a deterministic implementation.*")
