"""`out=` and in-place forms on cut tensors, which nothing derives: what one device writes, and where it writes it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from models import make_layout
from torch import nn

import torchtp
from torchtp.testing import run_ranks


def _like(values, dtype=None):
    return torch.empty_like(values, dtype=dtype)


def _slice(x, _):
    made = torch.zeros_like(x)
    torch.sub(x[:, 0:1], x[:, 1:2], out=made[:, 0:1])
    return made


def _buffer(x, buffer):
    torch.add(buffer, x.mean((0, 2, 3))[:, None, None], out=buffer)
    return x - buffer


def _clamped(x, _):
    made = x.clone()
    return torch.clamp(made, -1, 1, out=made)


def _standardized(x, _):
    made = x.clone()
    made.sub_(made.mean((2, 3), keepdim=True))
    return made.div_(made.std((2, 3), keepdim=True))


def _pair(values, indices):
    return values, indices


CASES = {
    "add": lambda x, _: torch.add(x, 1, out=_like(x)),
    "abs": lambda x, _: torch.abs(x, out=_like(x)),
    "compare": lambda x, _: torch.gt(x, 0, out=_like(x, torch.bool)).double(),
    "where": lambda x, _: torch.where(x > 0, x, -x, out=_like(x)),
    "into a slice": _slice,
    "into a buffer": _buffer,
    "into itself": _clamped,
    "into nothing": lambda x, _: torch.add(x, 1, out=torch.empty(0, dtype=x.dtype)),
    "sum": lambda x, _: torch.sum(x, 3, out=_like(x[..., 0])),
    "sum, plain": lambda x, _: torch.sum(x, (2, 3), out=torch.empty(2, 4, dtype=x.dtype)),
    "mean, plain": lambda x, _: torch.mean(x, (0, 2, 3), out=torch.empty(4, dtype=x.dtype)),
    "var": lambda x, _: torch.var(x, 3, out=_like(x[..., 0])),
    "joined": lambda x, _: torch.cat([x, x], 2, out=_like(torch.cat([x, x], 2))),
    "stacked": lambda x, _: torch.stack([x, x], 0, out=_like(torch.stack([x, x], 0))),
    "rows": lambda x, _: torch.index_select(x, 1, torch.tensor([0, 2]), out=_like(x[:, :2])),
    "products": lambda x, _: torch.matmul(x, x.transpose(2, 3), out=_like(x @ x.transpose(2, 3))),
    "cumulative": lambda x, _: torch.cumsum(x, 2, out=_like(x)),
    "largest": lambda x, _: torch.max(x, 3, out=_pair(_like(x[..., 0]), _like(x[..., 0], torch.long)))[0],
    "sorted": lambda x, _: torch.sort(x, 3, out=_pair(_like(x), _like(x, torch.long)))[0],
    "sorted, stable": lambda x, _: torch.sort(x, dim=2, stable=True, out=_pair(_like(x), _like(x, torch.long)))[0],
    "top": lambda x, _: torch.topk(x, 2, 3, out=_pair(_like(x[..., :2]), _like(x[..., :2], torch.long)))[0],
    "k-th": lambda x, _: torch.kthvalue(x, 3, 2, out=_pair(_like(x[:, :, 0]), _like(x[:, :, 0], torch.long)))[0],
    "inverse": lambda x, _: torch.linalg.inv(x[..., :4, :4], out=_like(x[..., :4, :4])),
    "determinant": lambda x, _: torch.linalg.det(x[..., :4, :4], out=_like(x[..., 0, 0])),
    "singular values": lambda x, _: torch.linalg.svdvals(x, out=_like(x[..., 0, :])),
    "pooled": lambda x, _: torch._C._nn.avg_pool2d(x, 2, out=_like(F.avg_pool2d(x, 2))),
    "standardized": _standardized,
    "relu_": lambda x, _: F.relu(x.clone(), inplace=True),
    "elu_": lambda x, _: F.elu_(x.clone()),
    "rrelu_": lambda x, _: F.rrelu(x.clone(), 0.1, 0.1, True, True),
    "threshold_": lambda x, _: F.threshold_(x.clone(), 0.0, 0.5),
    "hardtanh_": lambda x, _: F.hardtanh(x.clone(), -0.5, 0.5, inplace=True),
}


class Net(nn.Module):
    def __init__(self, case):
        super().__init__()
        self.case = CASES[case]
        self.register_buffer("kept", torch.ones(4, 1, 1, dtype=torch.float64))

    def forward(self, x):
        return self.case(x, self.kept)


def _wrong(axes):
    layout = make_layout(axes)
    image = torch.randn(2, 4, 8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    wrong = []
    with torch.no_grad():
        for case in CASES:
            one, cut = Net(case), torchtp.parallelize(Net(case), layout, output="full")
            expected, output = one(image), cut(image)
            if not (torch.allclose(output, expected) and torch.allclose(cut.kept, one.kept)):
                wrong.append(case)
    return wrong


@pytest.mark.parametrize("axes", [{"h": 3}, {"w": 2}, {"h": 2, "w": 2}], ids=str)
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_what_is_written_is_what_one_device_writes(axes):
    num_ranks = 4 if len(axes) == 2 else next(iter(axes.values()))
    assert run_ranks(_wrong, num_ranks, axes, timeout=120) == [[]] * num_ranks
