"""Resampling of images that are cut."""

from __future__ import annotations

from torch import nn


class Upsample(nn.Upsample):
    """torch.nn.Upsample with the coordinates of the whole image."""
