"""torchvision's roi_align of cut images: each rank samples what regions have in its own rows and columns, and these are summed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from torchtp.dtensor.cut import Placements, cut_of, interval
from torchtp.dtensor.moving import all_reduced
from torchtp.dtensor.registry import bound, library_function, library_rule
from torchtp.dtensor.rules.fallback import unruled
from torchtp.dtensor.rules.reduction import wide
from torchtp.dtensor.sharing import local_as
from torchtp.dtensor.spatial import arrange, is_spatial
from torchtp.dtensor.upstream import DeviceMesh, DTensor, Op, Replicate
from torchtp.dtensor.wrapping import Function, wrap

# Pixels: a region is one wide at least, may be shifted by half of one, and a sample reaches to the next one.
_MARGIN = 3


@dataclass
class _Cut:
    """Of an image [N, C, H, W], with at most one cut over H and over W."""

    mesh: DeviceMesh
    placements: Placements
    shape: torch.Size
    dtype: torch.dtype


class _Near:
    """What of the regions this rank samples: `which` touch its part, and these `regions` in pixels of the framed part.

    The `frame` is of zeros, one row wide where the image goes on: a sample between two parts takes from each what lies in
    it, and a sample beyond the part, which would fall back to its last row, falls on zeros.
    """

    def __init__(self, cut: _Cut, rois: torch.Tensor, scale: float):
        (top, bottom), (left, right) = (interval(cut.mesh, cut.placements, dim, cut.shape[dim]) for dim in (2, 3))
        self.own = [bottom - top, right - left]
        # Rows before and after, of the last dim first, as F.pad takes them.
        self.frame = [int(left > 0), int(right < cut.shape[3]), int(top > 0), int(bottom < cut.shape[2])]
        self.size = [self.own[0] + sum(self.frame[2:]), self.own[1] + sum(self.frame[:2])]  # framed
        begin = [left - self.frame[0], top - self.frame[2]]
        regions = local_as(rois, cut.mesh, (Replicate(),) * cut.mesh.ndim).to(wide(cut.dtype))
        numbers, corners = regions.split([1, 4], 1)
        corners = corners * scale - corners.new_tensor(begin * 2)
        self.regions = torch.cat([numbers, corners], 1)
        self.which: torch.Tensor | slice = slice(None)
        if not corners.is_meta:
            first, last = corners.split(2, 1)  # which may lie the other way round
            beyond = corners.new_tensor(self.size[::-1])
            far = (first.maximum(last) < -_MARGIN) | (first.minimum(last) > beyond + _MARGIN)
            self.which = far.any(1).logical_not().nonzero()[:, 0]
            self.regions = self.regions[self.which]


def _sampled(op: Op, input: DTensor, rois: torch.Tensor, *params: Any) -> tuple[DTensor, _Cut]:
    scale, height, width, ratio, aligned = params
    local, mesh, placements = arrange(op, input, lambda dim: dim >= 2)
    cut = _Cut(mesh, placements, input.shape, input.dtype)
    near = _Near(cut, rois, scale)
    sums = local.new_zeros([rois.size(0), input.size(1), height, width], dtype=near.regions.dtype)
    if local.numel():
        framed = F.pad(local.to(sums.dtype), near.frame)
        sums[near.which] = op(framed, near.regions, 1.0, height, width, ratio, aligned)
    spatial = cut_of(mesh, placements, input.shape)
    sums = all_reduced(sums, mesh, [] if spatial is None else spatial.axes).to(input.dtype)
    return wrap(sums, mesh, (Replicate(),) * mesh.ndim, sums.shape), cut


def _takes(input: Any) -> bool:
    return is_spatial(input) and input.dim() == 4


@library_rule("torchvision::roi_align")
def roi_align(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    values = bound(op, args, kwargs)
    return _sampled(op, *values)[0] if _takes(values[0]) else unruled(op, args, kwargs)


@library_function("torchvision::roi_align")
def differentiable_roi_align(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What derives it: the op's own backward is not told how the image was cut, and its gradient may be a plain tensor."""
    values = bound(op, args, kwargs)
    return _Sampled.apply(op, *values) if _takes(values[0]) else NotImplemented


class _Sampled(Function):
    @staticmethod
    def forward(ctx: Any, op: Op, input: DTensor, rois: torch.Tensor, *params: Any) -> Any:
        ctx.save_for_backward(rois)
        output, ctx.cut = _sampled(op, input, rois, *params)
        ctx.params = params
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        cut, (rois,), (scale, *params) = ctx.cut, ctx.saved_tensors, ctx.params
        near = _Near(cut, rois, scale)
        height, width = near.own
        num_images, channels = cut.shape[:2]
        local = local_as(grad, cut.mesh, (Replicate(),) * cut.mesh.ndim)
        if num_images * channels * height * width:
            *pooled, ratio, aligned = params
            given = local.to(near.regions.dtype)[near.which]
            backward = torch.ops.torchvision._roi_align_backward
            framed = backward(given, near.regions, 1.0, *pooled, num_images, channels, *near.size, ratio, aligned)
            left, _, top, _ = near.frame
            mine = framed[:, :, top : top + height, left : left + width].to(cut.dtype, copy=True)
        else:
            mine = local.new_zeros([num_images, channels, height, width], dtype=cut.dtype)
        return None, wrap(mine, cut.mesh, cut.placements, cut.shape), None, *[None] * (len(ctx.params))
