"""The gradient of what was summed or picked from is cut as that was, though others of its shape were cut otherwise."""

from __future__ import annotations

import pytest
import torch
from rules import W2, device_mesh_of
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import torchtp
from torchtp.testing import run_ranks

IMAGE = (2, 3, 8, 8)
CUTS = [(Shard(3),), (Shard(2),), (Replicate(),), (Shard(3),)]
READS = {
    "mean": lambda x: x.mean((2, 3)).sin(),
    "sum_of_all": lambda x: x.sum().sin(),
    "row": lambda x: x[:, :, 1].sin().sum() + x.select(3, 2).sin().sum(),
    "rows": lambda x: x[:, :, 1:2].sin().sum() + x[:, :, :, 5:6].sin().sum(),
    "points": lambda x: x[:, :, torch.tensor([0, 7]), torch.tensor([1, 6])].sin(),
    "checkpointed": lambda x: checkpoint(lambda x: x.mean((2, 3)).sin(), x, use_reentrant=False),
}


def gradients(name: str) -> None:
    mesh = device_mesh_of(W2[0])
    torchtp.dtensor.mark(mesh, [0])
    values = [torch.randn(IMAGE, generator=torch.Generator().manual_seed(i)).double() for i in range(len(CUTS))]
    cut = [
        distribute_tensor(value, mesh, placements, src_data_rank=None).requires_grad_()
        for value, placements in zip(values, CUTS, strict=True)
    ]
    for step in range(2):
        came: dict[int, tuple] = {}
        total = 0.0
        for i, leaf in enumerate(cut):
            tensor = leaf * 1
            tensor.register_hook(lambda grad, i=i, came=came: came.__setitem__(i, grad.placements))
            total = total + READS[name](tensor).sum()
            with torch.no_grad():
                READS[name](cut[i - 1])
        total.backward()
        for i, (leaf, value) in enumerate(zip(cut, values, strict=True)):
            plain = value.clone().requires_grad_()
            READS[name](plain).sum().backward()
            torch.testing.assert_close(leaf.grad.full_tensor(), plain.grad)
            if step:
                assert came[i] == CUTS[i], f"{name}: the gradient of {CUTS[i]} came as {came[i]}"
            leaf.grad = None


@pytest.mark.parametrize("name", READS)
def test_gradients_are_cut_as_what_was_read(name: str) -> None:
    run_ranks(gradients, W2[0][0], name)
