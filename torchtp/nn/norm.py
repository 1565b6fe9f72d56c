"""Normalisation of images that are cut: statistics are those of the whole image."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchtp import lazy


class _Norm(nn.Module):
    """Has the parameters and buffers of a norm meet cut activations as those of a parallelized module do."""

    weight = lazy.alias("weight")
    bias = lazy.alias("bias")
    running_mean = lazy.alias("running_mean")
    running_var = lazy.alias("running_var")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not isinstance(args[0] if args else kwargs["input"], DTensor):
            return super().forward(*args, **kwargs)
        with lazy.running():
            return super().forward(*args, **kwargs)


class BatchNorm1d(_Norm, nn.BatchNorm1d):  # type: ignore[misc]
    """torch.nn.BatchNorm1d with the statistics of all pieces of the images of this data rank."""


class BatchNorm2d(_Norm, nn.BatchNorm2d):  # type: ignore[misc]
    """torch.nn.BatchNorm2d with the statistics of all pieces of the images of this data rank."""


class BatchNorm3d(_Norm, nn.BatchNorm3d):  # type: ignore[misc]
    """torch.nn.BatchNorm3d with the statistics of all pieces of the images of this data rank."""


class InstanceNorm1d(_Norm, nn.InstanceNorm1d):  # type: ignore[misc]
    """torch.nn.InstanceNorm1d with the statistics of whole images."""


class InstanceNorm2d(_Norm, nn.InstanceNorm2d):  # type: ignore[misc]
    """torch.nn.InstanceNorm2d with the statistics of whole images."""


class InstanceNorm3d(_Norm, nn.InstanceNorm3d):  # type: ignore[misc]
    """torch.nn.InstanceNorm3d with the statistics of whole images."""


class GroupNorm(_Norm, nn.GroupNorm):  # type: ignore[misc]
    """torch.nn.GroupNorm with the statistics of whole images."""


class LayerNorm(_Norm, nn.LayerNorm):  # type: ignore[misc]
    """torch.nn.LayerNorm; over channels it is local."""


class LayerNorm2d(_Norm, nn.LayerNorm):  # type: ignore[misc]
    """LayerNorm over the channels of [N, C, H, W], as torchvision and timm have it; local."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
