"""Layer scale, DropPath and residual in one pass over images, cut or not."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from torchtp.dtensor.wrapping import from_part
from torchtp.parallel import lazy


class LayerScale(nn.Module):
    """residual + branch * gamma over the channels of [N, C, ...], and times keep [N] where it is given; local.

    `gamma` is a parameter [num_channels], `initial` everywhere. The result has the dtype of the residual.
    """

    def __init__(self, num_channels: int, initial: float = 1e-6):
        super().__init__()
        self.gamma = nn.Parameter(torch.full((num_channels,), initial))

    def forward(self, residual: torch.Tensor, branch: torch.Tensor, keep: torch.Tensor | None = None) -> torch.Tensor:
        return layer_scale(residual, branch, self.gamma, keep)


def layer_scale(
    residual: torch.Tensor, branch: torch.Tensor, gamma: torch.Tensor | None, keep: torch.Tensor | None = None
) -> torch.Tensor:
    """residual + branch * gamma[c] * keep[n] of two [N, C, ...] in one pass, in the residual's dtype.

    `gamma` [C] is a plain parameter or None; `keep` [N] is a mask, the same on all ranks of the images, or None. Cut
    DTensors are taken as the residual is cut. Raises ValueError where the sizes do not fit, TypeError where only one of
    the two is a DTensor.
    """
    gamma, keep = lazy.unwrap(gamma), lazy.unwrap(keep)
    if isinstance(residual, DTensor) != isinstance(branch, DTensor):
        raise TypeError("layer_scale: residual and branch are both cut or both plain, but one of them is a DTensor")
    if isinstance(keep, DTensor):  # made of an activation, as x.new_empty(len(x)).bernoulli_(0.9) is
        keep = keep.full_tensor()
    if not isinstance(residual, DTensor):
        return _scaled(residual, branch, gamma, keep)
    kept = tuple(p if type(p) is Shard and p.dim >= 2 else Replicate() for p in residual.placements)
    mesh = residual.device_mesh
    factor = math.prod(mesh.size(axis) for axis, place in enumerate(kept) if isinstance(place, Shard))
    ours, other = (
        part.redistribute(mesh, kept).to_local(grad_placements=kept)  # type: ignore[attr-defined]
        for part in (residual, branch)
    )
    output = _scaled(ours, other, gamma if gamma is None else lazy.Scaled.apply(gamma, factor), keep)
    return from_part(output, mesh, kept, residual.shape, residual)


def _scaled(
    residual: torch.Tensor, branch: torch.Tensor, gamma: torch.Tensor | None, keep: torch.Tensor | None
) -> torch.Tensor:
    return torch.ops.torchtp.layer_scale(residual, branch.to(residual.dtype), gamma, keep)
