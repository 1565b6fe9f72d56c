"""Convolutions of images that are cut, in every padding mode."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from torchtp.dtensor.cut import axes_of, owned
from torchtp.dtensor.spatial import local_part
from torchtp.dtensor.wrapping import from_part
from torchtp.nn.padding import CutDim, padded_rows
from torchtp.parallel import lazy


class _PaddedConvolution(nn.modules.conv._ConvNd):
    """Zero padding is the rules'; the other modes pad what they pull."""

    def _conv_forward(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if _is_depthwise(self, input):
            return _depthwise(self, input, weight, bias)
        if self.padding_mode == "zeros" or not isinstance(input, DTensor) or input.dim() != weight.dim():
            return super()._conv_forward(input, weight, bias)  # type: ignore[misc]
        return convolution_padded(
            input,
            weight,
            bias,
            self._reversed_padding_repeated_twice,
            self.padding_mode,
            (self.stride, self.dilation, self.groups),
        )


def as_under_autocast(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """What autocast hands to F.conv2d: float64 stays as it is."""
    kind = input.device.type

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.dtype == torch.float64 else tensor.to(torch.get_autocast_dtype(kind))

    if not torch.is_autocast_enabled(kind):
        return input, weight, bias
    return cast(input), cast(weight), None if bias is None else cast(bias)


def _is_depthwise(layer: nn.modules.conv._ConvNd, input: torch.Tensor) -> bool:
    """Whether a plain image on a device meets one filter a channel, for which there are kernels."""
    return (
        not isinstance(input, DTensor)
        and input.is_cuda
        and input.dim() == 4
        and layer.groups == layer.in_channels == layer.out_channels
        and layer.padding_mode == "zeros"
        and not isinstance(layer.padding, str)
    )


def _depthwise(
    layer: nn.modules.conv._ConvNd, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    input, weight, bias = as_under_autocast(input, weight, bias)
    params = layer.stride, layer.padding, layer.dilation, False, [0] * (input.dim() - 2), layer.groups
    return torch.ops.torchtp.convolution(input, weight, bias, *params, [], [], [])


class Conv1d(_PaddedConvolution, nn.Conv1d):
    """torch.nn.Conv1d of [N, C, L] cut on L."""


class Conv2d(_PaddedConvolution, nn.Conv2d):
    """torch.nn.Conv2d of [N, C, H, W] cut on H, W or both."""


class Conv3d(_PaddedConvolution, nn.Conv3d):
    """torch.nn.Conv3d of [N, C, D, H, W] cut on any of D, H, W."""


class ConvTranspose1d(nn.ConvTranspose1d):
    """torch.nn.ConvTranspose1d of [N, C, L] cut on L."""


class ConvTranspose2d(nn.ConvTranspose2d):
    """torch.nn.ConvTranspose2d of [N, C, H, W] cut on H, W or both."""


class ConvTranspose3d(nn.ConvTranspose3d):
    """torch.nn.ConvTranspose3d of [N, C, D, H, W] cut on any of D, H, W."""


def convolution_padded(
    input: DTensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    pads: list[int],
    mode: str,
    params: tuple[Any, Any, int],
) -> DTensor:
    """Convolve a cut image that is padded by `pads` (as F.pad wants them) in `mode`, with plain parameters."""
    stride, dilation, groups = params
    if min(stride) <= 0 or min(dilation) <= 0:
        raise ValueError(f"convolution: stride and dilation must be positive, got {list(stride)} and {list(dilation)}")
    local, kept = local_part(torch.ops.aten.convolution.default, input, lambda dim: dim >= 2)
    mesh = input.device_mesh
    axes = axes_of(mesh)
    shape = [input.size(0), weight.size(0)]
    before: dict[int, int] = {}
    for dim in range(2, input.dim()):
        i = 2 * (input.dim() - 1 - dim)
        before[dim], after = pads[i], pads[i + 1]
        _check_padding(input.size(dim), max(pads[i], after), mode, dim)
        reach = dilation[dim - 2] * (weight.size(dim) - 1)
        shape.append((input.size(dim) + before[dim] + after - reach - 1) // stride[dim - 2] + 1)
        if shape[dim] <= 0:
            raise ValueError(
                f"convolution: kernel {weight.size(dim)} with dilation {dilation[dim - 2]} and padding {before[dim]} and "
                f"{after} does not fit into dim {dim} of extent {input.size(dim)}"
            )
    uncut = list(pads)
    steps = list(stride)
    factor, is_empty = 1, False
    for axis, placement in enumerate(kept):
        if not isinstance(placement, Shard):
            continue
        dim = placement.dim
        factor *= axes.sizes[axis]
        i = 2 * (input.dim() - 1 - dim)
        uncut[i] = uncut[i + 1] = 0
        reach = dilation[dim - 2] * (weight.size(dim) - 1)
        outs = [owned(shape[dim], axes.sizes[axis], rank) for rank in range(axes.sizes[axis])]
        wanted = [
            (begin * stride[dim - 2] - before[dim], (end - 1) * stride[dim - 2] - before[dim] + reach + 1)
            if begin < end
            else (0, 0)
            for begin, end in outs
        ]
        cut = CutDim(dim, input.size(dim), axes.groups[axis], axes.ranks[axis])
        local = padded_rows(local, cut, wanted, mode)
        is_empty = is_empty or wanted[cut.rank][0] >= wanted[cut.rank][1]
        if local.size(dim) == reach + 1:
            steps[dim - 2] = 1  # NOTE [one output has no stride] in csrc/spatial/convolution_geometry.h
    if factor > 1:
        weight = lazy.Scaled.apply(weight, factor)
        bias = None if bias is None else lazy.Scaled.apply(bias, factor)
    out_shape = torch.Size(shape)
    convolve = (F.conv1d, F.conv2d, F.conv3d)[input.dim() - 3]
    if is_empty:
        # Nothing to compute, but backward must take part in the exchanges of the others, in the dtype that they have.
        # So must its own backward: the gradient is that of a convolution here as well, which depends on the weight.
        extents = list(out_shape)
        for axis, placement in enumerate(kept):
            if isinstance(placement, Shard):
                begin, end = owned(extents[placement.dim], axes.sizes[axis], axes.ranks[axis])
                extents[placement.dim] = end - begin
        window = [d * (kernel - 1) + 1 for d, kernel in zip(dilation, weight.shape[2:], strict=True)]
        zeros = local.new_zeros(*local.shape[:2], *window) + local[:0].sum()
        some = convolve(zeros, weight, bias, 1, 0, dilation, groups)
        output = some.new_zeros(extents) + some[:0].sum()
    else:
        if any(uncut):
            local = F.pad(local, uncut, mode)
        output = convolve(local, weight, bias, steps, 0, dilation, groups)
    return from_part(output, mesh, kept, out_shape, input)


def _check_padding(extent: int, padding: int, mode: str, dim: int) -> None:
    limit = extent - 1 if mode == "reflect" else extent
    if mode != "replicate" and padding > limit:
        raise ValueError(
            f"{mode} padding of dim {dim} takes at most {limit} rows of an image of extent {extent}, got {padding}"
        )
