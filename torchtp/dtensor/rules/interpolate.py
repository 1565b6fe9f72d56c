"""Resampling of cut DTensors: nearest, linear and cubic, antialiased or not, forward and backward."""

from __future__ import annotations

from typing import Any

import torch

from torchtp.dtensor.cut import axes_of, cut_further, cut_of, is_cut, owned
from torchtp.dtensor.own_images import takes_images_cut_twice
from torchtp.dtensor.registry import bound, rule
from torchtp.dtensor.rules.fallback import unruled
from torchtp.dtensor.sharing import local_as
from torchtp.dtensor.spatial import arrange, mark
from torchtp.dtensor.upstream import DTensor, Op
from torchtp.dtensor.wrapping import wrap

# aten's function (its backward is the name with _backward) -> the mode of torchtp::interpolate.
MODES = {
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
    "_upsample_bilinear2d_aa": "linear-antialias",
    "_upsample_bicubic2d_aa": "cubic-antialias",
}

ops = torch.ops.torchtp


def _params(mode: str, size: list[int], others: list[Any]) -> tuple[str, list[int], list[float], bool]:
    """The arguments after the sizes are align_corners, where the mode has it, and one scale or None for each dim."""
    align_corners = bool(others[0]) if "nearest" not in mode else False
    return mode, size, [scale or 0.0 for scale in others[-len(size) :]], align_corners


def _cut_as_what_was_pooled(input: Any, output_size: list[int]) -> Any:
    """What an image was pooled to and is now made as large as the image again is whole; that is to be cut as the image."""
    if not isinstance(input, DTensor) or is_cut(input):
        return input
    mesh = input.device_mesh
    pooled_from = axes_of(mesh).taken_from.images_alike(input.size(0), output_size)
    if pooled_from is None:
        return input
    placements = cut_further(input.placements, pooled_from, lambda dim: dim >= 2)
    return wrap(local_as(input, mesh, placements), mesh, placements, input.shape)


@rule(*(name + "." for name in MODES))
@takes_images_cut_twice
def interpolate(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    input, output_size, *others = bound(op, args, kwargs)
    input = _cut_as_what_was_pooled(input, output_size)
    mode = MODES[op._schema.name.removeprefix("aten::")]
    picks = input.dtype is torch.uint8 and "nearest" in mode
    if not is_cut(input) or not (input.is_floating_point() or picks):
        return unruled(op, args, kwargs)
    local, mesh, placements = arrange(op, input, lambda _dim: True)
    cut = cut_of(mesh, placements, input.shape)
    assert cut is not None
    mark(mesh, cut.axes)
    params = _params(mode, list(output_size), others)
    output = ops.interpolate(local.float() if picks else local, *params, cut.dims, cut.extents, cut.groups).to(
        input.dtype
    )
    return wrap(output, mesh, placements, torch.Size([*input.shape[:2], *output_size]))


@rule(*(name + "_backward." for name in MODES))
@takes_images_cut_twice
def interpolate_backward(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Cut as the output's gradient is, also where the input was whole: its gradient is smaller than the output's."""
    grad_output, output_size, input_size, *others = bound(op, args, kwargs)
    if not is_cut(grad_output):
        return unruled(op, args, kwargs)
    local, mesh, placements = arrange(op, grad_output, lambda _dim: True)
    shape = torch.Size(input_size)
    cut = cut_of(mesh, placements, shape)
    assert cut is not None
    params = _params(MODES[op._schema.name.removeprefix("aten::").removesuffix("_backward")], list(output_size), others)
    sizes = [*local.shape[:2], *shape[2:]]
    for dim, extent, axis in zip(cut.dims, cut.extents, cut.axes, strict=True):
        begin, end = owned(extent, mesh.size(axis), mesh.get_local_rank(axis))
        sizes[dim] = end - begin
    grad_input = ops.interpolate_backward(local, sizes, *params, cut.dims, cut.extents, cut.groups)
    return wrap(grad_input, mesh, placements, shape)
