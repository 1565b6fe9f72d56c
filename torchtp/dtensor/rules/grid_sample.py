"""F.grid_sample of cut images and volumes: each rank pulls the rows and columns that its part of the grid points at, and no more."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from torchtp.dtensor.cut import Placements, axes_of, sums_done
from torchtp.dtensor.moving import recut
from torchtp.dtensor.own_images import takes_images_cut_twice
from torchtp.dtensor.registry import bound, spatial_rule
from torchtp.dtensor.rules.fallback import unruled
from torchtp.dtensor.rules.reduction import wide
from torchtp.dtensor.rules.window import Window
from torchtp.dtensor.sharing import local_as
from torchtp.dtensor.spatial import is_spatial
from torchtp.dtensor.upstream import (
    DeviceMesh,
    DTensor,
    Op,
    Partial,
    Replicate,
    Shard,
    local_of,
    plain_shard,
    spec_of,
)
from torchtp.dtensor.wrapping import wrap

aten = torch.ops.aten

_NEAREST, _BICUBIC = 1, 2
_BORDER, _REFLECTION = 1, 2
_OF_CUDNN = (0, 0, True)  # bilinear, zeros beside the image, corners aligned


@dataclass
class _Pulled:
    """The window of the input that this rank samples, its own part of the grid in the window's coordinates."""

    mesh: DeviceMesh
    placements: Placements  # of the input
    grid_placements: Placements
    output_placements: Placements
    window: Window
    image: torch.Tensor  # what is in it, of the dtype that is computed in
    grid: torch.Tensor
    padding: int  # beside the window
    scale: torch.Tensor  # of the gradient from the window's coordinates to the image's


def _meeting(input: Any, grid: Any) -> tuple[DeviceMesh, Placements, Placements, Placements] | None:
    """The mesh, and how the input, the grid and the output are cut on it; None where they do not fit."""
    lead = input if is_spatial(input) else grid
    if not is_spatial(lead) or input.dtype != grid.dtype:
        return None
    if grid.dim() != input.dim() or grid.size(-1) != input.dim() - 2 or grid.size(0) != input.size(0):
        raise RuntimeError(
            f"grid_sample: a grid of shape {tuple(grid.shape)} does not fit an input of shape {tuple(input.shape)}: it has "
            "the input's batch, and for each place a number for each dim behind the channels"
        )
    along = range(2, input.dim())
    as_input, as_grid = (0, None, *along), (0, *along, None)  # the input's dim for each of theirs
    of_lead = as_input if lead is input else as_grid
    cut: list[Any] = []
    for placement in spec_of(lead).placements:
        if isinstance(placement, (Replicate, Partial)):
            cut.append((Replicate(), Replicate()))
        elif plain_shard(placement) and (dim := of_lead[placement.dim]) is not None:
            cut.append((Shard(dim), Shard(as_grid.index(dim))))
        else:
            return None
    placements, of_grid = (tuple(side) for side in zip(*cut, strict=True))
    sharded = [placement.dim for placement in placements if isinstance(placement, Shard)]
    if len(set(sharded)) < len(sharded):
        return None
    for other, wanted in ((input, placements), (grid, of_grid)):
        if isinstance(other, DTensor) and (
            other.device_mesh != lead.device_mesh
            or any(
                # A grid of two numbers a place is moved to where the image is.
                new != old and not isinstance(old, (Replicate, Partial)) and not (other is grid and plain_shard(old))
                for old, new in zip(spec_of(other).placements, wanted, strict=True)
            )
        ):
            return None
    of_output = _with_rows(placements, (*input.shape[:2], *grid.shape[1:-1]), axes_of(lead.device_mesh).sizes)
    if of_output != placements:
        of_grid = tuple(Shard(as_grid.index(p.dim)) if plain_shard(p) else p for p in of_output)
    return lead.device_mesh, placements, of_grid, of_output


def _with_rows(placements: Placements, shape: tuple[int, ...], sizes: tuple[int, ...]) -> Placements:
    """Another dim of the grid cut where it has no rows for all ranks: of a list of points, [N, C, points, 1], these, by several axes too."""
    held = {placement.dim for placement in placements if plain_shard(placement)}
    wanted = list(placements)
    for axis, placement in enumerate(placements):
        if not plain_shard(placement) or placement.dim < 2 or shape[placement.dim] >= sizes[axis]:
            continue
        free = [dim for dim in range(2, len(shape)) if dim not in held and shape[dim] >= sizes[axis]]
        free = free or [dim for dim in range(2, len(shape)) if shape[dim] >= math.prod(sizes)]
        if free:
            dim = max(free, key=lambda dim: shape[dim])
            wanted[axis] = Shard(dim)
            held.add(dim)
    return tuple(wanted)


def _pixels(along: torch.Tensor, extent: int, align_corners: bool, fused: bool) -> torch.Tensor:
    """Where along a dim of `extent` a grid points, to the last bit as the kernels of grid_sample have it.

    Compilers make one rounding of a product and a difference (`fused`) but for the volumes of CPUs, as `add_` does with `alpha`.
    """
    if align_corners:
        return along.add(1).mul((extent - 1) / 2)
    if fused:
        return torch.full_like(along, -0.5).add_(along.add(1), alpha=extent / 2)
    return along.add(1).mul(extent).sub(1).div(2)


def _reflected(pixels: torch.Tensor, extent: int, align_corners: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Places beside the image as its border shows them, over and over, and the derivative by where they were: 1 or -1.

    The border is a pixel's middle with `align_corners`, else its outer edge: then up to half a pixel is left beside the image.
    """
    low = 0.0 if align_corners else -0.5
    span = extent - 1 if align_corners else extent
    if not span:
        return torch.zeros_like(pixels), torch.zeros_like(pixels)
    from_border = pixels.sub(low)
    distance = from_border.abs()
    beyond = distance.fmod(span)
    is_turned = distance.div(span).floor().fmod(2) != 0
    places = torch.where(is_turned, span - beyond + low, beyond + low)
    ones = torch.ones_like(pixels)
    return places, torch.where(is_turned == (from_border < 0), ones, -ones)


def _on_their_side(places: torch.Tensor, size: int, first: bool, last: bool, border: bool) -> torch.Tensor:
    """Places in a window, none so near to a pixel that it would be on its other side after it has been scaled to -1 ... 1 and back.

    Derivatives have steps at pixels, and a flow that is still zero samples at nothing but pixels. By border padding, what is
    at the first or last pixel of the image (`first`, `last`: whether the window has it) is as good as outside.
    """
    pixel = places.round()
    margin = 3 * torch.finfo(places.dtype).eps * size  # six roundings of numbers up to 2, times half the size
    below = places < pixel
    if border and first:
        below = below | (places <= 0)
    if border and last:
        below = below & (places < size - 1)
    moved = torch.where(below, pixel - margin, pixel + margin)
    return torch.where((places - pixel).abs() < margin, moved, places)


def pulled_window(input: Any, grid: Any, mode: int, align_corners: bool, padding: int = 0) -> _Pulled | None:
    """What this rank samples, brought to it; None where input and grid are not cut alike. All ranks of the mesh call it."""
    meeting = _meeting(input, grid)
    if meeting is None:
        return None
    mesh, placements, grid_placements, output_placements = meeting
    window = Window(local_as(input, mesh, placements), mesh, placements, input.shape)
    own = local_as(grid, mesh, grid_placements)
    dtype = wide(input.dtype)
    columns, scales = [], []
    # Reflected places are beside the image by half a pixel at most, which shows its border.
    beside = _BORDER if padding == _REFLECTION else padding
    num_dims = input.dim() - 2
    for dim in range(2, input.dim()):
        extent = input.size(dim)
        fused = num_dims == 2 or own.is_cuda
        pixels = _pixels(own[..., num_dims + 1 - dim].to(dtype), extent, align_corners, fused)
        scale: float | torch.Tensor = 1
        if padding == _REFLECTION:
            pixels, scale = _reflected(pixels, extent, align_corners)
            pixels = pixels.clamp(0, extent - 1) if mode == _NEAREST else pixels
        if mode == _NEAREST:
            pixels = pixels.round()
        begin = window.pull(dim, pixels, 2 if mode == _BICUBIC else 1) if window.is_cut(dim) else 0
        size = window.local.size(dim)
        # The window's own coordinates, as without align_corners: -1 and 1 are its outer edges.
        places = _on_their_side(pixels.sub(begin), size, begin == 0, begin + size == extent, beside == _BORDER)
        columns.append(places.mul(2).add(1).div(size).sub(1))
        scales.append(columns[-1].new_tensor((extent - 1 if align_corners else extent) / size) * scale)
    moved, of_gradient = (torch.stack(along[::-1], -1) for along in (columns, scales))
    image = window.local.to(dtype)
    return _Pulled(mesh, placements, grid_placements, output_placements, window, image, moved, beside, of_gradient)


@spatial_rule("grid_sampler_2d", "grid_sampler_3d")
@takes_images_cut_twice
def grid_sample(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _sampled(op, args, kwargs, bound(op, args, kwargs))


@spatial_rule("cudnn_grid_sampler")
def cudnn_grid_sample(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _sampled(op, args, kwargs, (*bound(op, args, kwargs), *_OF_CUDNN))


@spatial_rule("grid_sampler_2d_backward", "grid_sampler_3d_backward")
@takes_images_cut_twice
def grid_sample_backward(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _gradients(op, args, kwargs, bound(op, args, kwargs))


@spatial_rule("cudnn_grid_sampler_backward")
def cudnn_grid_sample_backward(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    input, grid, grad = bound(op, args, kwargs)
    return _gradients(op, args, kwargs, (grad, input, grid, *_OF_CUDNN, [True, True]))


def _window_of(input: Any, grid: Any, mode: int, padding: int, align_corners: bool) -> _Pulled | None:
    if padding == _REFLECTION and mode == _BICUBIC:  # reflects each of a sample's 16 pixels, in the image
        return None
    return pulled_window(input, grid, mode, align_corners, padding)


def _sampled(op: Op, args: Any, kwargs: Any, values: tuple[Any, ...]) -> Any:
    input, grid, mode, padding, align_corners = values
    pulled = _window_of(input, grid, mode, padding, align_corners)
    if pulled is None:
        return unruled(op, args, kwargs)
    sample = aten.grid_sampler_2d if input.dim() == 4 else aten.grid_sampler_3d
    local = sample(pulled.image, pulled.grid, mode, pulled.padding, False)
    shape = torch.Size([*input.shape[:2], *grid.shape[1:-1]])
    return wrap(local.to(input.dtype), pulled.mesh, pulled.output_placements, shape)


def _gradients(op: Op, args: Any, kwargs: Any, values: tuple[Any, ...]) -> Any:
    grad, input, grid, mode, padding, align_corners, wanted = values
    pulled = _window_of(input, grid, mode, padding, align_corners)
    if pulled is None:
        return unruled(op, args, kwargs)
    local = local_as(grad, pulled.mesh, pulled.output_placements).to(pulled.image.dtype)
    derive = aten.grid_sampler_2d_backward if input.dim() == 4 else aten.grid_sampler_3d_backward
    of_window, of_grid = derive(local, pulled.image, pulled.grid, mode, pulled.padding, False, [wanted[0], True])
    of_input = None
    if wanted[0]:
        mine = pulled.window.give_back(of_window).to(input.dtype)
        of_input = wrap(mine, pulled.mesh, pulled.placements, input.shape)
    if not wanted[1]:
        return of_input, None
    of_grid = wrap(of_grid.mul(pulled.scale).to(grid.dtype), pulled.mesh, pulled.grid_placements, grid.shape)
    if isinstance(grid, DTensor):  # as it came: whole of an affine transform or some points
        as_given = sums_done(spec_of(grid).placements)
        given = recut(local_of(of_grid), spec_of(of_grid), as_given)
        of_grid = wrap(given, pulled.mesh, as_given, grid.shape)
    return of_input, of_grid
