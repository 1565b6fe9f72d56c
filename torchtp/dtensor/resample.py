"""F.interpolate on cut DTensors: taps at global coordinates."""

from __future__ import annotations

from typing import Any

import torch

from torchtp.dtensor.cut import cut_of, local_as, wrap
from torchtp.dtensor.fallback import unruled
from torchtp.dtensor.registry import bound, rule
from torchtp.dtensor.spatial import arrange, mark
from torchtp.dtensor.upstream import DTensor, Op

ops = torch.ops.torchtp

_MODES = {
    "upsample_nearest1d": "nearest",
    "upsample_nearest2d": "nearest",
    "upsample_nearest3d": "nearest",
    "_upsample_nearest_exact1d": "nearest-exact",
    "_upsample_nearest_exact2d": "nearest-exact",
    "_upsample_nearest_exact3d": "nearest-exact",
    "upsample_linear1d": "linear",
    "upsample_bilinear2d": "linear",
    "upsample_trilinear3d": "linear",
    "upsample_bicubic2d": "cubic",
}


def _any(_dim: int) -> bool:
    return True


def _params(mode: str, output_size: Any, rest: list[Any]) -> tuple[str, list[int], list[float], bool]:
    """What torchtp::interpolate wants from an aten op's [align_corners,] scales."""
    align_corners = bool(rest.pop(0)) if mode in ("linear", "cubic") else False
    return mode, list(output_size), [float(scale or 0) for scale in rest], align_corners


def _is_cut(tensor: Any) -> bool:
    return isinstance(tensor, DTensor) and cut_of(tensor.device_mesh, tensor.placements, tensor.shape) is not None


@rule(*(name + "." for name in _MODES))
def interpolate(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    input, output_size, *rest = bound(op, args, kwargs)
    if not _is_cut(input):
        return unruled(op, args, kwargs)
    local, mesh, placements = arrange(op, input, _any)
    cut = cut_of(mesh, placements, input.shape)
    assert cut is not None
    mark(mesh, cut.axes)
    params = _params(_MODES[op._schema.name.split("::")[1]], output_size, rest)
    output = ops.interpolate(local, *params, cut.dims, cut.extents, cut.groups)
    return wrap(output, mesh, placements, torch.Size([*input.shape[:2], *output_size]))


@rule(*(name + "_backward." for name in _MODES))
def interpolate_backward(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grad_output, output_size, input_size, *rest = bound(op, args, kwargs)
    if not _is_cut(grad_output):
        return unruled(op, args, kwargs)
    _, mesh, placements = arrange(op, grad_output, _any)
    shape = torch.Size(input_size)
    cut = cut_of(mesh, placements, shape)
    assert cut is not None
    params = _params(_MODES[op._schema.name.split("::")[1].removesuffix("_backward")], output_size, rest)
    local_sizes = list(local_as(torch.empty(shape, device="meta"), mesh, placements).shape)
    grad_input = ops.interpolate_backward(
        local_as(grad_output, mesh, placements), local_sizes, *params, cut.dims, cut.extents, cut.groups
    )
    return wrap(grad_input, mesh, placements, shape)
