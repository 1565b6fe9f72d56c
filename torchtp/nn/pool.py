"""Pooling of images that are cut; the rules of `torchtp.dtensor` compute it."""

from __future__ import annotations

from torch import nn


class MaxPool1d(nn.MaxPool1d):
    """torch.nn.MaxPool1d with the windows of the whole image."""


class MaxPool2d(nn.MaxPool2d):
    """torch.nn.MaxPool2d with the windows of the whole image."""


class MaxPool3d(nn.MaxPool3d):
    """torch.nn.MaxPool3d with the windows of the whole image."""


class AvgPool1d(nn.AvgPool1d):
    """torch.nn.AvgPool1d with the windows of the whole image."""


class AvgPool2d(nn.AvgPool2d):
    """torch.nn.AvgPool2d with the windows of the whole image."""


class AvgPool3d(nn.AvgPool3d):
    """torch.nn.AvgPool3d with the windows of the whole image."""


class AdaptiveAvgPool1d(nn.AdaptiveAvgPool1d):
    """torch.nn.AdaptiveAvgPool1d with the bins of the whole image."""


class AdaptiveAvgPool2d(nn.AdaptiveAvgPool2d):
    """torch.nn.AdaptiveAvgPool2d with the bins of the whole image."""


class AdaptiveAvgPool3d(nn.AdaptiveAvgPool3d):
    """torch.nn.AdaptiveAvgPool3d with the bins of the whole image."""


class AdaptiveMaxPool2d(nn.AdaptiveMaxPool2d):
    """torch.nn.AdaptiveMaxPool2d with the bins of the whole image."""
