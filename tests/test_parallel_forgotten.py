"""What `parallelize` makes for a module goes with it; what is remembered of tensors stays bounded and quick."""

import gc
import weakref

import torch
from models import make_layout
from torch import nn
from torch.distributed.tensor import Shard
from torch.nn.utils import parametrizations

import torchtp
from torchtp.dtensor.origins import Origins
from torchtp.testing import run_ranks


def _with_classes_of_its_own():
    """PyTorch makes a class for every parametrized module, and functions that build networks define some."""

    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.gamma = nn.Parameter(torch.ones(4, 1, 1))

        def forward(self, x):
            return self.gamma * x

    return nn.Sequential(parametrizations.weight_norm(nn.Conv2d(2, 4, 3, padding=1)), Scale(), nn.SyncBatchNorm(4))


def _classes_left(layout):
    model = torchtp.parallelize(_with_classes_of_its_own(), layout, output="full")
    classes = [weakref.ref(kind) for part in model for kind in type(part).__mro__ if kind.__module__ != "builtins"]
    model(torch.randn(2, 2, 5, 7)).sum().backward()
    del model
    gc.collect()
    gc.collect()  # a class is found when nothing of it is left
    return {kind().__qualname__ for kind in classes if kind() is not None}


def _classes_are_forgotten():
    layout = make_layout({"w": 2})
    left = _classes_left(layout)
    assert "SyncBatchNorm" in left and not any("Parametrized" in name or name.endswith("Scale") for name in left), left


def test_classes_go_with_their_last_module():
    run_ranks(_classes_are_forgotten, 2)


def test_origins_keep_the_latest():
    origins = Origins()
    shapes = [torch.Size((n, 3)) for n in range(40_000)]
    for shape in shapes:
        origins.note(shape, (Shard(1),), requires_grad=False)
    known = [origins.of(shape) is not None for shape in shapes]
    assert all(known[-10_000:]) and not any(known[:-20_000])
    assert known == sorted(known)
