"""A depthwise convolution and the LayerNorm behind it in one op on images, cut or not."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor, Shard

from torchtp.dtensor.cut import cut_of
from torchtp.dtensor.spatial import local_part
from torchtp.dtensor.wrapping import from_part
from torchtp.nn.convolution import as_under_autocast
from torchtp.parallel import lazy

Pair = int | Sequence[int]


def depthwise_layer_norm(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Convolve [N, C, H, W] with one filter a channel, `weight` [C, 1, kH, kW], and norm the result over its channels.

    As LayerNorm2d behind Conv2d with groups=C, whose parameters these are; plain ones. Under autocast the convolution's
    are cast as there. Raises ValueError where the sizes do not fit, RuntimeError for a kernel beyond the
    padded image.
    """
    weight, bias, norm_weight, norm_bias = (lazy.unwrap(tensor) for tensor in (weight, bias, norm_weight, norm_bias))
    params = _pair(stride), _pair(padding), _pair(dilation)
    if not isinstance(input, DTensor):
        return _on_own_rows(input, weight, bias, norm_weight, norm_bias, eps, params, ([], [], []))
    local, kept = local_part(torch.ops.aten.convolution.default, input, lambda dim: dim != 1)
    mesh = input.device_mesh
    factor = math.prod(mesh.size(axis) for axis, place in enumerate(kept) if isinstance(place, Shard))
    weight = lazy.Scaled.apply(weight, factor)
    bias, norm_weight, norm_bias = (
        parameter if parameter is None else lazy.Scaled.apply(parameter, factor)
        for parameter in (bias, norm_weight, norm_bias)
    )
    cut = cut_of(mesh, kept, input.shape)
    lists = ([], [], []) if cut is None else (cut.dims, cut.extents, cut.groups)
    output = _on_own_rows(local, weight, bias, norm_weight, norm_bias, eps, params, lists)
    extents = [
        (extent + 2 * p - d * (kernel - 1) - 1) // s + 1
        for extent, kernel, s, p, d in zip(input.shape[2:], weight.shape[2:], *params, strict=True)
    ]
    shape = torch.Size([*input.shape[:2], *extents])
    return from_part(output, mesh, kept, shape, input)


def _pair(value: Pair) -> list[int]:
    return [value, value] if isinstance(value, int) else list(value)


def _on_own_rows(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    eps: float,
    params: tuple[list[int], list[int], list[int]],
    cut: tuple[list[int], list[int], list[str]],
) -> torch.Tensor:
    input, weight, bias = as_under_autocast(input, weight, bias)
    op = torch.ops.torchtp.depthwise_layer_norm
    return op(input, weight, bias, norm_weight, norm_bias, eps, False, *params, *cut)[0]
