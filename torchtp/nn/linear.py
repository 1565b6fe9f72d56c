"""Linear on images whose channels are the last dim."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchtp import lazy


class Linear(nn.Linear):
    """torch.nn.Linear; of a cut [N, ..., C] it is local."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if isinstance(input, DTensor):
            return lazy.linear(input, self.weight, self.bias)
        return super().forward(input)
