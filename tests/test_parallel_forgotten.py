"""What `parallelize` makes for a module goes with it; what is remembered of tensors stays bounded and quick."""

import gc
import unittest.mock
import weakref

import torch
from models import make_layout
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._redistribute import _gen_transform_infos, _planner_cache
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


def _remembered_of_shapes():
    propagated = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding
    return {
        "moves": _gen_transform_infos.cache_info().currsize,
        "planners": len(_planner_cache),
        "ops": propagated.cache_info().currsize,
        "fake tensors": len(FakeTensorMode.cache),
    }


def _many_sizes(most):
    """What PyTorch remembers more of after images of many sizes, where of `most` of their tensors something is."""
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.GELU(), nn.Conv2d(2, 1, 3, padding=1))
    model = torchtp.parallelize(model, make_layout({"w": 2}), output="full")
    before = _remembered_of_shapes()
    with unittest.mock.patch("torchtp.dtensor.wrapping.MOST_SHAPES", most):
        for size in range(200):
            model(torch.ones(1, 1, 4 + size % 20, 4 + size // 20)).sum().backward()
    return {name: count - before[name] for name, count in _remembered_of_shapes().items()}


def test_sizes_that_do_not_come_back_do_not_pile_up():
    grown = run_ranks(_many_sizes, 2, 100_000, fresh=True)[0]
    assert max(grown.values()) > 150, grown  # as it would
    bounded = run_ranks(_many_sizes, 2, 100, fresh=True)[0]
    assert all(bounded[name] < max(count, 150) / 2 for name, count in grown.items()), (bounded, grown)


def test_origins_keep_the_latest():
    origins = Origins()
    shapes = [torch.Size((n, 3)) for n in range(40_000)]
    for shape in shapes:
        origins.note(shape, (Shard(1),), requires_grad=False)
    known = [origins.of(shape) is not None for shape in shapes]
    assert all(known[-10_000:]) and not any(known[:-20_000])
    assert known == sorted(known)
