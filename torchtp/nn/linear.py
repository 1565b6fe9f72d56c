"""Linear on images whose channels are the last dim."""

from __future__ import annotations

from torch import nn


class Linear(nn.Linear):
    """torch.nn.Linear; of a cut [N, ..., C] it is local."""
