"""The rows and columns of a cut image that a rank samples at places which only the data tell."""

from __future__ import annotations

import torch

from torchtp.dtensor.cut import Placements, axes_of, cut_of
from torchtp.dtensor.moving import all_reduced
from torchtp.dtensor.upstream import DeviceMesh

ops = torch.ops.torchtp

_NOBODY = -(1 << 62)  # less than any begin or end


class Window:
    """`local` grows, from this rank's part of an image, by what is pulled for it; gradients go back the same way."""

    def __init__(self, local: torch.Tensor, mesh: DeviceMesh, placements: Placements, shape: torch.Size):
        self.local = local
        self._mesh, self._shape = mesh, shape
        self._cut = cut_of(mesh, placements, shape)
        self._pulls: list[tuple[int, int, list[int], list[int], str]] = []  # what ops.pull was given, in order

    def is_cut(self, dim: int) -> bool:
        return self._cut is not None and dim in self._cut.dims

    def pull(self, dim: int, pixels: torch.Tensor, reach: int = 1) -> int:
        """Along a dim that is cut bring what samples at `pixels`, each `reach` to both sides, need; where that begins. All ranks call it."""
        assert self._cut is not None
        which, extent = self._cut.dims.index(dim), self._shape[dim]
        begins, ends = self._wanted_rows(pixels, extent, self._cut.axes[which:], reach)
        self._pulls.append((dim, extent, begins, ends, self._cut.groups[which]))
        self.local = ops.pull(self.local, *self._pulls[-1])
        return begins[self._mesh.get_local_rank(self._cut.axes[which])]

    def give_back(self, grad: torch.Tensor) -> torch.Tensor:
        """The gradient of this rank's part of the image, from that of the window."""
        for pull in reversed(self._pulls):
            grad = ops.push_add(grad, *pull)
        return grad

    def _wanted_rows(
        self, pixels: torch.Tensor, extent: int, over: list[int], reach: int
    ) -> tuple[list[int], list[int]]:
        """What each rank of the first of the axes `over` wants: the union over the others, whose ranks pull along other dims
        next. Without data, the most it can be."""
        axes = axes_of(self._mesh)
        size, rank = axes.sizes[over[0]], axes.ranks[over[0]]
        if pixels.is_meta:
            return [0] * size, [extent] * size
        begin, end = _touched(pixels, extent, reach)
        told = torch.full((size, 2), _NOBODY)
        told[rank] = torch.tensor([-begin, end])
        begins, ends = all_reduced(told.to(pixels.device), self._mesh, over, "max").t().tolist()
        return [-begin for begin in begins], ends


def _touched(pixels: torch.Tensor, extent: int, reach: int) -> tuple[int, int]:
    """The rows with a weight in any sample, one at least. What is NaN counts as 0, which is what padding makes of it."""
    if not pixels.numel():
        return 0, 1
    low, high = pixels.nan_to_num(0).clamp(-8, extent + 8).aminmax()
    begin = min(max(int(low.floor()) - reach, 0), extent - 1)
    return begin, max(begin + 1, min(int(high.ceil()) + 1 + reach, extent))
