"""Normalisation of images that are cut: statistics are those of the whole image."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from torchtp.dtensor.spatial import local_part
from torchtp.dtensor.wrapping import from_part
from torchtp.parallel import lazy
from torchtp.parallel.running import running


class _Norm(nn.Module):
    """Has the parameters and buffers of a norm meet cut activations as those of a parallelized module do."""

    weight = lazy.alias("weight")
    bias = lazy.alias("bias")
    running_mean = lazy.alias("running_mean")
    running_var = lazy.alias("running_var")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not isinstance(args[0] if args else kwargs["input"], DTensor):
            return super().forward(*args, **kwargs)
        with running():
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


class LayerNorm2d(nn.LayerNorm):
    """LayerNorm over the channels of [N, C, H, W], as torchvision and timm have it; local, keeps only mean and rstd."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not isinstance(input, DTensor):
            return _over_channels(input, self.weight, self.bias, self.eps)
        local, kept = local_part(torch.ops.aten.native_layer_norm.default, input, lambda dim: dim != 1, nested=True)
        mesh = input.device_mesh
        factor = math.prod(mesh.size(axis) for axis, place in enumerate(kept) if isinstance(place, Shard))
        weight, bias = (
            parameter if parameter is None else lazy.Scaled.apply(lazy.unwrap(parameter), factor)
            for parameter in (self.weight, self.bias)
        )
        output = _over_channels(local, weight, bias, self.eps)
        return from_part(output, mesh, kept, input.shape, input)


def _over_channels(
    input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    return torch.ops.torchtp.layer_norm_channels_first(input, lazy.unwrap(weight), lazy.unwrap(bias), eps)[0]
