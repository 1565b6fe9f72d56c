"""The blocks of networks.py with torchtp's layers, which keep less for backward and run its kernels on a GPU.

Parameters have the same names, so checkpoints of either load into the other. They work on plain tensors of one device,
without a process group, and inside `torchtp.parallelize`.
"""

from __future__ import annotations

import torch.nn.functional as F
from networks import Block
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torchtp.nn as tnn


class FusedBlock(Block):
    """A ConvNeXt block: depthwise 7x7 and LayerNorm over C in one op; layer scale, DropPath and residual in another.

    What the GELU makes, a third of what a block would keep for backward, is computed again there; the product behind it
    is not.
    """

    def __init__(self, num_channels: int, drop_path: float):
        super().__init__(num_channels, drop_path)
        self.depthwise = tnn.Conv2d(num_channels, num_channels, 7, padding=3, groups=num_channels)
        self.norm = channel_norm(num_channels)

    def forward(self, x: Tensor) -> Tensor:
        first, norm = self.depthwise, self.norm
        y = tnn.depthwise_layer_norm(
            x, first.weight, first.bias, norm.weight, norm.bias, padding=3, eps=norm.eps
        ).permute(0, 2, 3, 1)
        y = checkpoint(self._activated, self.expand(y), use_reentrant=False, preserve_rng_state=False)
        y = y.permute(0, 3, 1, 2)
        path = self.drop_path
        keep = path.mask.flatten() if path.mask is not None and path.training and path.probability > 0 else None
        return tnn.layer_scale(x, y, self.scale, keep)

    def _activated(self, y: Tensor) -> Tensor:
        return self.project(F.gelu(y))


def channel_norm(num_channels: int) -> nn.Module:
    return tnn.LayerNorm2d(num_channels, eps=1e-6)
