"""What `explain` tells without running is what a run measures, and the caller notices nothing of it."""

from __future__ import annotations

import gc
import itertools
import random
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import make_layout, make_network
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import torchtp
from torchtp import _C
from torchtp.dtensor import notice
from torchtp.planning import explaining
from torchtp.planning.measure import SavedBytes
from torchtp.testing import run_ranks


class Everything(nn.Module):
    """Pools, resampling, rolls, an op without a rule in forward and one that only its backward has, a frozen part."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4, momentum=None), nn.ReLU(True))
        self.wide = nn.Conv2d(4, 4, 9, padding=4).requires_grad_(False)
        self.scale = nn.Parameter(torch.linspace(1, 2, 4).view(4, 1, 1))
        self.leave = nn.Linear(4, 3)

    def forward(self, x):
        x = F.max_pool2d(self.wide(self.enter(x)) * self.scale, 3, 2, 1)
        x = F.interpolate(x, scale_factor=2, mode="bilinear") + x.mean((2, 3), keepdim=True)
        smaller = F.avg_pool2d(x.roll(1, 3), 2)
        grid = F.affine_grid(torch.eye(2, 3).expand(len(x), 2, 3), list(smaller.shape), align_corners=False)
        x = F.grid_sample(
            smaller, grid, "bicubic", padding_mode="reflection", align_corners=False
        ) + F.adaptive_avg_pool2d(x, 1)
        return self.leave(F.dropout(x, 0.1).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Tokens(nn.Sequential):
    """Gives an image that was a sequence of its pixels, and so is cut along its rows."""

    def forward(self, x):
        y = self[0](x)
        return self[1](y.flatten(2).transpose(1, 2)).transpose(1, 2).view(y.shape)


def make(name):
    torch.manual_seed(0)
    if name == "tokens":
        return Tokens(nn.Conv2d(2, 4, 3, padding=1), nn.Linear(4, 4))
    return Everything() if name == "everything" else make_network(name, dtype=torch.float32)


def measure(name, axes, shape):
    """(bytes kept, bytes sent, exchanges, gathers) of this rank in a real step; without axes on a single device."""
    model, images, groups, gathers = make(name), torch.randn(shape), [], []
    parameters = list(model.parameters())
    if axes:
        layout = make_layout(axes)
        torchtp.parallelize(model, layout, reduce=False)
        images = layout.shard(images)
        groups = [layout.spatial_mesh.get_group(axis).group_name for axis in range(len(axes))]
    before = [_C.traffic(group) for group in groups]
    local = images.to_local() if axes else images
    with notice.told_to(lambda op, shape, dtype: gathers.append((str(op), tuple(shape), dtype))):
        with SavedBytes([*parameters, local]) as saved:
            output = model(images)
        num_bytes = saved.num_bytes
        torch.autograd.backward(output, torch.ones_like(output))
    after = [_C.traffic(group) for group in groups]

    def new(key):
        return sum(now[key] - then[key] for now, then in zip(after, before, strict=True))

    return num_bytes, new("num_bytes"), new("num_exchanges"), new("num_beyond_neighbours"), gathers


@pytest.mark.parametrize(
    ("name", "axes", "shape"),
    [
        ("unet", {"w": 2}, (2, 2, 13, 17)),
        ("unet", {"h": 2, "w": 2}, (1, 2, 25, 33)),
        ("convnext", {"h": 2}, (2, 2, 22, 18)),
        ("convnext", {"h": 1, "w": 3}, (1, 2, 8, 14)),
        ("batch_norm", {"w": 4}, (2, 2, 12, 10)),
        ("everything", {"w": 2}, (2, 2, 12, 20)),
        ("everything", {"h": 2, "w": 2}, (2, 2, 16, 24)),
    ],
)
def test_what_is_told_is_what_a_run_measures(name, axes, shape):
    told = torchtp.explain(make(name), shape, axes)
    size = torch.Size(axes.values()).numel()
    measured = run_ranks(measure, size, name, axes, shape)
    assert told.single_bytes == measure(name, {}, shape)[0]
    assert [rank.kept_bytes for rank in told.ranks] == [rank[0] for rank in measured]
    assert [rank.exchanged_bytes for rank in told.ranks] == [rank[1] for rank in measured]
    assert [rank.num_exchanges for rank in told.ranks] == [rank[2] for rank in measured]
    assert max(rank.kept_bytes for rank in told.ranks) == told.kept_bytes == told.ranks[0].kept_bytes
    assert any(e.num_beyond_neighbours for e in told.exchanges) == any(rank[3] for rank in measured)
    expected = sorted(
        (g.op if g.op.count(".") > 1 else g.op + ".default", g.shape, str(g.dtype))
        for g in told.gathers
        for _ in range(g.times)
    )
    assert expected == sorted((op, shape, str(dtype)) for op, shape, dtype in measured[0][4])
    assert bool(expected) == (name == "everything")


class Collectives(TorchDispatchMode):
    """Counts those of a step: (op, bytes)."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if op.namespace == "_c10d_functional" and "wait" not in op.name() and "wrap" not in op.name():
            self.seen.append((op.name().replace("::", "."), args[0].nbytes))
        return op(*args, **(kwargs or {}))


def collectives(name, axes, shape):
    layout = make_layout(axes)
    model = torchtp.parallelize(make(name), layout, reduce=False)
    images = layout.shard(torch.randn(shape))
    warnings.simplefilter("ignore", torchtp.GatherWarning)
    with Collectives() as mode:
        output = model(images)
        torch.autograd.backward(output, torch.ones_like(output))
    return mode.seen


@pytest.mark.parametrize("name", ["everything", "tokens"])
@pytest.mark.parametrize("axes", [{"w": 2}, {"h": 2, "w": 2}])
def test_collectives_told_are_those_of_a_run(axes, name):
    shape = (2, 2, 16, 24)
    told = torchtp.explain(make(name), shape, axes)
    seen = run_ranks(collectives, torch.Size(axes.values()).numel(), name, axes, shape)[0]
    ours = [each for each in told.collectives if each.op.startswith("_c10d_functional")]
    assert sum(each.times for each in ours) == len(seen) > 0
    assert sum(each.num_bytes for each in ours) == sum(num_bytes for _, num_bytes in seen)
    assert {each.op for each in ours} == {op for op, _ in seen}


def test_ops_are_found_in_their_modules_in_forward_and_backward():
    told = torchtp.explain(Everything(), (2, 2, 12, 20), {"w": 2})
    assert {(g.op, g.module, g.phase) for g in told.gathers} >= {
        ("aten.grid_sampler_2d", "", "forward"),
        ("aten.grid_sampler_2d_backward", "", "backward"),
    }
    halos = {(e.op, e.module, e.phase) for e in told.exchanges}
    assert {
        ("torchtp.convolution", "enter.0", "forward"),
        ("torchtp.convolution", "wide", "forward"),
        ("torchtp.convolution_backward", "wide", "backward"),
        ("torchtp.max_pool", "", "forward"),
    } <= halos
    statistics = {(c.op, c.module, c.phase) for c in told.collectives}
    assert {
        ("torchtp.batch_norm", "enter.1", "forward"),
        ("torchtp.batch_norm_backward", "enter.1", "backward"),
    } <= statistics
    gradients = sum(p.numel() for p in Everything().parameters()) - sum(
        p.numel() for p in Everything().wide.parameters()
    )
    assert told.gradient_bytes == 4 * gradients


def test_parts_that_are_empty_or_too_thin_are_told():
    network = nn.Sequential(nn.Conv2d(1, 1, 3, padding=1), nn.MaxPool2d(2), nn.Conv2d(1, 1, 5, padding=2))
    told = torchtp.explain(network, (1, 1, 8, 10), {"w": 4})
    (empty,) = told.empty
    assert (empty.op, empty.module, empty.axis, empty.extent, empty.num_empty) == ("aten.convolution", "2", "w", 5, 1)
    assert {e.module for e in told.exchanges if e.num_beyond_neighbours} == set()
    told = torchtp.explain(nn.Sequential(nn.Conv2d(1, 1, 9, padding=4)), (1, 1, 8, 8), {"w": 4})
    assert {e.module for e in told.exchanges if e.num_beyond_neighbours} == {"0"}
    assert "beyond the next rank" in str(told)


def test_a_huge_image_needs_no_memory_and_half_of_the_bits_half_of_the_bytes():
    network = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1))
    told = torchtp.explain(network, (1, 3, 100_000, 100_000), {"h": 2, "w": 2, "data": 2})
    assert told.single_bytes == 64 * 100_000**2 * 4
    assert told.share == 0.25
    half = torchtp.explain(network, (1, 3, 100_000, 100_000), {"h": 2, "w": 2}, dtype=torch.bfloat16)
    assert half.kept_bytes * 2 == told.kept_bytes and half.gradient_bytes * 2 == told.gradient_bytes


def test_of_many_ranks_those_at_the_ends_are_rehearsed():
    network = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1))
    told = torchtp.explain(network, (1, 3, 320, 320), {"h": 8, "w": 4})
    places = [(rank.coordinates["h"], rank.coordinates["w"]) for rank in told.ranks]
    between = [(h, 1) for h in range(2, 6)]
    assert places == sorted([*itertools.product((0, 1, 6, 7), range(4)), *between])


def test_of_many_ranks_the_one_that_sends_most_is_rehearsed(monkeypatch):
    network = nn.Sequential(nn.Conv2d(3, 8, 4, stride=4), nn.MaxPool2d(3, 2, 1), nn.Conv2d(8, 8, 3, padding=1))
    told = torchtp.explain(network, (1, 3, 64, 1003), {"w": 20})
    monkeypatch.setattr(explaining, "_MAX_ALL", 1000)
    every = torchtp.explain(network, (1, 3, 64, 1003), {"w": 20})
    assert told.exchanged_bytes == every.exchanged_bytes > 0


def state(network):
    return (
        {name: (value, value.clone(), value._version) for name, value in network.state_dict().items()},
        {name: (type(module), len(module._forward_hooks), module.training) for name, module in network.named_modules()},
    )


def test_the_caller_notices_nothing():
    numpy = pytest.importorskip("numpy")
    network = Everything()
    network.register_forward_hook(lambda *_: numpy.random.rand() and None)
    values, modules = state(network)
    rng, python, filters, said = torch.get_rng_state(), random.getstate(), list(warnings.filters), set(notice._said)
    numbers = numpy.random.get_state()[1:3]
    with warnings.catch_warnings(), torch.no_grad(), torchtp.strict():
        warnings.simplefilter("error")
        assert torchtp.explain(network, (1, 2, 12, 20), {"w": 2}).gathers
    assert torch.equal(rng, torch.get_rng_state()) and python == random.getstate()
    assert all(map(numpy.array_equal, numbers, numpy.random.get_state()[1:3]))
    assert filters == list(warnings.filters) and said == notice._said
    again, modules_again = state(network)
    assert modules == modules_again
    for name, (_, value, version) in values.items():
        assert torch.equal(again[name][0], value) and again[name][2] == version
    assert all(parameter.grad is None for parameter in network.parameters())
    assert not dist.is_initialized()


def explain_beside_a_group():
    layout = make_layout({"w": 2})
    before = dist.group.WORLD, dist.get_rank()
    told = torchtp.explain(Everything(), (1, 2, 12, 20), {"w": 4 if dist.get_rank() else 2})
    assert before == (dist.group.WORLD, dist.get_rank())
    model = torchtp.parallelize(make("unet"), layout)
    model(torch.ones(1, 2, 13, 17)).sum().backward()
    return len(told.ranks)


def test_groups_of_a_job_that_runs_are_left_alone():
    assert run_ranks(explain_beside_a_group, 2) == [2, 4]


@pytest.mark.parametrize(
    ("shape", "mesh", "message"),
    [
        ((1, 2, 0, 8), {"w": 2}, "positive extents"),
        ((1, 2, 8), {"h": 2}, "no dims"),
        ((1, 2, 8, 8), {"x": 2}, "axis 'x'"),
        ((1, 2, 8, 8), {"w": 0}, "axis 'w'"),
        ((1, 2, 8, 8), {"data": 2}, "no axis cuts"),
        ((1, 3, 8, 8), {"w": 2}, "channel"),
    ],
)
def test_a_mistake_is_told(shape, mesh, message):
    with pytest.raises(ValueError, match=message):
        torchtp.explain(Everything(), shape, mesh)


@pytest.mark.parametrize(
    ("module", "shape", "mesh", "message"),
    [
        (3, (1, 2, 8, 8), {"w": 2}, "takes a torch.nn.Module, but the first argument is a int"),
        (nn.ReLU(), 3, {"w": 2}, "explain takes a shape, .* but it is 3"),
        (nn.ReLU(), "1,2,8,8", {"w": 2}, "explain takes a shape, .* but it is '1,2,8,8'"),
        (nn.ReLU(), (1, 2, 8, 8), "h=2", "a dict of sizes, but it is 'h=2'"),
    ],
)
def test_what_is_of_another_type_is_told(module, shape, mesh, message):
    with pytest.raises(TypeError, match=message):
        torchtp.explain(module, shape, mesh)


def test_a_module_that_looks_at_values_is_told():
    class Peeks(nn.Conv2d):
        def forward(self, x):
            return super().forward(x if x.max() > 0 else -x)

    with pytest.raises(ValueError, match="values"):
        torchtp.explain(Peeks(2, 2, 3), (1, 2, 8, 8), {"w": 2})


def test_volumes_are_cut_in_depth():
    network = nn.Sequential(nn.Conv3d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, 2, 3, padding=1))
    told = torchtp.explain(network, (1, 2, 8, 6, 6), {"d": 4})
    assert told.share == 0.25
    assert {e.num_exchanges for e in told.exchanges} == {1}
    # an inner rank sends a plane of each input and of each output's gradient to both sides; the first needs no gradient
    assert told.exchanged_bytes == 2 * 6 * 6 * 4 * (2 + 4 + 2 + 4)


def test_threads_explain_one_after_the_other_and_nothing_grows():
    network = make("unet")
    with ThreadPoolExecutor(4) as pool:
        told = list(pool.map(lambda _: torchtp.explain(network, (1, 2, 13, 17), {"h": 2, "w": 2}), range(4)))
    told.append(torchtp.explain(network, (1, 2, 13, 17), {"h": 2, "w": 2}))  # caches of DTensor are a thread's
    assert len({each.exchanged_bytes for each in told}) == 1
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(5):
        torchtp.explain(network, (1, 2, 13, 17), {"h": 2, "w": 2})
    gc.collect()
    assert len(gc.get_objects()) - before < 100


def test_several_images():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.convolution = nn.Conv2d(4, 2, 3, padding=1)

        def forward(self, left, right):
            return {"sum": [self.convolution(torch.cat([left, right], 1))]}

    told = torchtp.explain(Two(), [(1, 2, 8, 8), (1, 2, 8, 8)], {"w": 2})
    assert told.kept_bytes == 4 * 8 * 4 * 4


class CrossedStrip(nn.Module):
    """As coordinate attention has it: what was pooled over columns meets them as a row."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x):
        x = self.enter(x)
        return x * x.mean(3, keepdim=True).transpose(2, 3)


def test_a_strip_is_moved_and_the_image_stays_cut():
    for mesh in ({"h": 4}, {"w": 4}):
        assert not torchtp.explain(CrossedStrip(), (2, 3, 32, 32), mesh).gathers
    told = torchtp.explain(CrossedStrip(), (2, 3, 32, 32), {"h": 2, "w": 2})
    assert {tuple(gather.shape) for gather in told.gathers} == {(2, 8, 1, 32)}
    assert told.share < 0.3


def _with_process_groups():
    layers = nn.Conv2d(3, 4, 3, padding=1), nn.SyncBatchNorm(4), nn.ReLU()
    plain = nn.Sequential(layers[0], nn.BatchNorm2d(4), layers[2])
    mine, theirs = (torchtp.explain(each, (1, 3, 8, 8), {"w": 2}) for each in (nn.Sequential(*layers), plain))
    assert str(mine) == str(theirs)


def test_a_synchronized_norm_in_a_job_that_runs():
    run_ranks(_with_process_groups, 2)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_a_scripted_part_is_refused():
    with pytest.raises(ValueError, match="can't run TorchScript without data, and 0 is such"):
        torchtp.explain(nn.Sequential(torch.jit.script(nn.Conv2d(3, 4, 3)), nn.ReLU()), (1, 3, 8, 8), {"w": 2})
