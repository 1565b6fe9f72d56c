"""Histograms of cut DTensors, as confusion matrices and monitors ask them: each rank counts its part, the counts are summed."""

from __future__ import annotations

import math
from typing import Any

import torch

from torchtp.dtensor.cut import Placements, axes_cutting, sums_done
from torchtp.dtensor.moving import all_reduced, recut
from torchtp.dtensor.nesting import takes_nested
from torchtp.dtensor.registry import bound, spatial_rule
from torchtp.dtensor.rules.fallback import unruled
from torchtp.dtensor.rules.shape import taken
from torchtp.dtensor.sharing import local_as
from torchtp.dtensor.upstream import DeviceMesh, DTensor, Op, Replicate, local_of, spec_of
from torchtp.dtensor.wrapping import wrap


def extremes(local: torch.Tensor, mesh: DeviceMesh, axes: list[int]) -> tuple[float, float]:
    """The least and the largest element of all parts over the axes; (inf, -inf) of none, nan of both where there is one."""
    if local.numel():
        least, largest = torch.aminmax(local)
        ends = torch.stack([-least.double(), largest.double()])
    else:
        ends = local.new_full((2,), -math.inf, dtype=torch.double)
    is_nan = ends.isnan()
    ends = all_reduced(torch.cat([ends.masked_fill(is_nan, -math.inf), is_nan.double()]), mesh, axes, "max")
    lowest, highest, *nans = ends.tolist()
    return (math.nan, math.nan) if any(nans) else (-lowest, highest)


class Counted:
    """A tensor of which each rank counts its part."""

    def __init__(self, tensor: DTensor):
        self.mesh = tensor.device_mesh
        self.placements: Placements = sums_done(spec_of(tensor).placements)
        self.local = recut(local_of(tensor), spec_of(tensor), self.placements)
        self._axes = axes_cutting(self.placements)

    def range(self) -> tuple[float, float]:
        """`extremes` of the whole."""
        return extremes(self.local, self.mesh, self._axes)

    def summed(self, counts: torch.Tensor) -> DTensor:
        whole = all_reduced(counts, self.mesh, self._axes)
        return wrap(whole, self.mesh, (Replicate(),) * self.mesh.ndim, whole.shape)


@spatial_rule("bincount")
@takes_nested
def bincount(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, weights, minlength = bound(op, args, kwargs)
    fits = taken(tensor) and tensor.dim() == 1 and not tensor.is_floating_point() and minlength >= 0
    if not fits or (weights is not None and weights.shape != tensor.shape):
        return unruled(op, args, kwargs)
    counted = Counted(tensor)
    least, largest = counted.range()
    if least < 0:
        return op(torch.tensor([-1]))  # refuses it, on all ranks alike
    own = None if weights is None else local_as(weights, counted.mesh, counted.placements)
    length = max(minlength, 1 + int(largest)) if tensor.numel() else minlength
    counts = op(counted.local, own, length)
    if weights is not None:  # of no elements PyTorch counts whole numbers
        counts = counts.to(torch.float32 if weights.dtype is torch.float32 else torch.float64)
    return counted.summed(counts)


@spatial_rule("histc")
@takes_nested
def histc(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, bins, low, high = bound(op, args, kwargs)
    if not taken(tensor) or bins <= 0 or low > high:
        return unruled(op, args, kwargs)
    counted = Counted(tensor)
    if low == high and tensor.numel():
        low, high = counted.range()
        if not math.isfinite(low) or not math.isfinite(high):
            return op(torch.tensor([low, high], dtype=tensor.dtype), bins)  # refuses it, on all ranks alike
    if low == high:
        low, high = low - 1, high + 1
    return counted.summed(op(counted.local, bins, low, high))
