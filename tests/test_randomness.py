"""Masks of DropPath and dropout: one for all ranks of an image, the single device's, again in a recomputation."""

import copy
import random

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import torchtp
from torchtp.testing import run_ranks

try:
    import numpy
    import numpy.random
except ImportError:
    numpy = None


def _layout(axes, spatial, data=None):
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    return torchtp.Layout(mesh, spatial, data)


class Masks(nn.Module):
    """Every way in which models draw random numbers in forward."""

    def __init__(self, reentrant=None):
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 3, 3, padding=1)
        self.reentrant = reentrant

    def noisy(self, x):
        if not self.training:
            return x
        sample = (x.shape[0], 1, 1, 1)
        x = x * x.new_empty(sample).bernoulli_(0.5)  # timm's DropPath
        x = x + torch.empty(sample, dtype=x.dtype).bernoulli_(0.5)  # torchvision's StochasticDepth, born plain
        x = F.dropout(x, 0.3)
        x = F.dropout2d(x, 0.3)
        places = x.flatten(2)  # merged dims and what becomes of them lie in memory as one device's
        x = F.dropout(torch.bmm(places @ places.mT, places).view(x.shape), 0.3)
        x = x + 0.1 * torch.rand_like(x) + 0.1 * torch.randn_like(x)
        x = x + torch.bernoulli(x.sigmoid()) + torch.normal(x.sin().mean((0, 2, 3), keepdim=True).expand_as(x), 0.1)
        spread = places.sigmoid()
        drawn = (
            torch.normal(0.0, spread)
            + torch.normal(places, 0.1)
            + torch.normal(places.detach().mT, spread.detach().mT).mT
        )
        x = x + 0.1 * drawn.view(x.shape)
        return x * torch.rand(x.shape[0], 1, 1, 1, dtype=x.dtype)

    def forward(self, x):
        x = self.first(x)
        if self.reentrant is None:
            x = self.noisy(x)
        else:
            x = checkpoint(self.noisy, x, use_reentrant=self.reentrant)
        return self.second(x)


def _model(**options):
    torch.manual_seed(5)
    return Masks(**options).double()


def _step(model, x, seed):
    torch.manual_seed(seed)
    output = model(x)
    output = output.full_tensor() if isinstance(output, torch.distributed.tensor.DTensor) else output
    output.square().mean().backward()
    return output.detach(), [p.grad.clone() for p in model.parameters()]


def _equals_the_single_device(axes, spatial, memory_format, reentrant):
    x = torch.randn(3, 2, 7, 9, dtype=torch.float64).contiguous(memory_format=memory_format)
    expected, gradients = _step(_model().to(memory_format=memory_format), x, 3)
    model = torchtp.parallelize(_model(reentrant=reentrant).to(memory_format=memory_format), _layout(axes, spatial))
    output, actual = _step(model, x, 3)
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)
    for mine, theirs in zip(actual, gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)
    after = torch.get_rng_state()
    _step(_model(), x, 3)
    assert torch.equal(after, torch.get_rng_state())


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("axes, spatial", [({"w": 2}, {"w": -1}), ({"h": 2, "w": 2}, {"h": -2, "w": -1})])
def test_masks_are_those_of_the_single_device(axes, spatial, reentrant):
    size = torch.Size(axes.values()).numel()
    run_ranks(_equals_the_single_device, size, axes, spatial, torch.contiguous_format, reentrant)


def test_masks_are_those_of_the_single_device_in_channels_last():
    run_ranks(_equals_the_single_device, 2, {"w": 2}, {"w": -1}, torch.channels_last, None)


def _heads(x):
    tokens = x.flatten(2).transpose(1, 2)
    return (tokens @ torch.ones(4, 6, dtype=x.dtype)).unflatten(-1, (2, 3)).transpose(1, 2)


WRITTEN_ANEW = {
    "roll": lambda x: x.roll((1, 2), (2, 3)),
    "reflect": lambda x: F.pad(x, (1, 2, 2, 1), mode="reflect"),
    "replicate": lambda x: F.pad(x, (1, 2, 2, 1), mode="replicate"),
    "circular": lambda x: F.pad(x, (1, 2, 2, 1), mode="circular"),
    "adaptive average": lambda x: F.adaptive_avg_pool2d(x, (3, 2)),
    "adaptive maximum": lambda x: F.adaptive_max_pool2d(x, (3, 2)),
    "area": lambda x: F.interpolate(x, size=(3, 4), mode="area"),
    "unpooled": lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2, output_size=x.shape[2:]),
    "shuffled": lambda x: F.pixel_shuffle(x, 2),
    "softmax of rows": lambda x: x.softmax(2),
    "log softmax of columns": lambda x: x.log_softmax(3),
    "patches": lambda x: F.unfold(x, 3, padding=1),
    "tokens": lambda x: x.flatten(2).transpose(1, 2),
    "pixels": lambda x: x.permute(2, 3, 0, 1).flatten(0, 1),
    "heads": _heads,
}


def _masks_of_what_is_written_anew(axes):
    layout = _layout(axes, dict.fromkeys(axes, -1) if len(axes) == 1 else {"h": -2, "w": -1})
    differing = []
    for name, function in WRITTEN_ANEW.items():
        for order in (torch.contiguous_format, torch.channels_last):
            for shape in ((2, 4, 8, 9), (1, 4, 16, 20)):
                x = torch.randn(shape, dtype=torch.float64).to(memory_format=order)
                cut = layout.shard(x)
                masks = []
                for given in (x, cut):
                    torch.manual_seed(3)
                    mask = F.dropout(function(given).abs() + 1) == 0
                    masks.append(mask.full_tensor() if given is cut else mask)
                if not torch.equal(*masks):
                    differing.append((name, order, shape))
    assert not differing, differing


@pytest.mark.parametrize("axes", [{"h": 3}, {"h": 2, "w": 2}], ids=str)
def test_masks_of_what_ranks_write_anew_are_those_of_the_single_device(axes):
    run_ranks(_masks_of_what_is_written_anew, 4 if "w" in axes else 3, axes)


def _seeded_apart():
    x = torch.randn(3, 2, 7, 9, dtype=torch.float64)
    single, model = _model(), torchtp.parallelize(_model(), _layout({"w": 2}, {"w": -1}))
    expected = [_step(single, x, 0)[0], single(x).detach()]
    rank = dist.get_rank()
    outputs = [_step(model, x, rank)[0], model(x).full_tensor().detach()]
    torch.testing.assert_close(outputs, expected, rtol=1e-10, atol=1e-10)
    assert not torch.equal(outputs[0], outputs[1])
    torch.manual_seed(rank)
    model.eval()
    model(x)
    mine = torch.get_rng_state()
    torch.manual_seed(rank)
    assert torch.equal(mine, torch.get_rng_state())


def test_ranks_seeded_apart_agree_on_masks():
    run_ranks(_seeded_apart, 2)


class Augmented(nn.Module):
    """Draws from Python's generator, by which it branches, and from NumPy's."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, padding=1)

    def forward(self, x):
        x = self.conv(x)
        if random.random() < 0.5:
            x = x.flip(-1)
        weight = random.gauss(1.0, 0.1)
        if numpy is not None:
            weight += numpy.random.beta(0.5, 0.5) + numpy.random.randn()
        return weight * x + x.flip(0) + torch.rand(3, 1, 1)


def _seed_as_nobody(rank):
    """torch's generator alike, the others apart."""
    torch.manual_seed(0)
    random.seed(rank)
    if numpy is not None:
        numpy.random.seed(rank)


def _draw():
    return random.gauss(0, 1), None if numpy is None else numpy.random.randn(), torch.rand(()).item()


def _python_and_numpy(axes):
    layout = _layout(axes, {"w": -1}, "dp" if "dp" in axes else None)
    x = torch.randn(3, 2, 7, 9, dtype=torch.float64)
    single = Augmented().double()
    model = torchtp.parallelize(copy.deepcopy(single), layout, output="full")
    _seed_as_nobody(0)
    expected = [single(x).detach() for _ in range(5)]
    after = _draw()
    _seed_as_nobody(dist.get_rank())
    outputs = [model(x).detach() for _ in range(5)]
    drawn = _draw()
    if layout.num_data == 1:
        torch.testing.assert_close(outputs, expected, rtol=1e-10, atol=1e-10)
        assert drawn == after or dist.get_rank() > 0
    return layout.data_rank, outputs, drawn


@pytest.mark.parametrize("axes", [{"w": 2}, {"dp": 2, "w": 2}], ids=str)
def test_what_python_and_numpy_draw_is_the_same_on_all_ranks_of_an_image(axes):
    results = run_ranks(_python_and_numpy, torch.Size(axes.values()).numel(), axes)
    for data_rank, outputs, drawn in results:
        first = next(each for each in results if each[0] == data_rank)
        assert all(torch.equal(*each) for each in zip(outputs, first[1], strict=True))
        assert drawn[2] == results[0][2][2]  # seeded alike, torch's generator went on alike
    assert len({drawn[0] for *_, drawn in results}) == len(results)  # and Python's stayed each rank's own
    if "dp" in axes:
        assert not torch.equal(results[0][1][0], results[-1][1][0])


def _one_number_more():
    """Normal numbers come in pairs: rank 0 has used both of one, rank 1 has the second one still to come."""
    random.seed(0)
    numpy.random.seed(0)
    numpy.random.randn(2 - dist.get_rank())
    drawn = []

    class Gain(nn.Module):
        def forward(self, x):
            drawn.append(numpy.random.randn())
            return x * drawn[-1]

    torchtp.parallelize(Gain(), _layout({"w": 2}, {"w": -1}))(torch.ones(1, 1, 2, 4))
    return drawn


@pytest.mark.skipif(numpy is None, reason="needs NumPy")
def test_a_normal_number_still_to_come_is_part_of_the_state():
    first, second = run_ranks(_one_number_more, 2)
    assert first == second


def _only_torch_is_seeded():
    layout = _layout({"dp": 2, "w": 1}, {"w": -1}, "dp")
    model = torchtp.parallelize(_model(), layout, output="full")
    outputs = []
    for seed in (1, 2):
        torch.manual_seed(0)
        random.seed(seed)
        outputs.append(model(torch.ones(3, 2, 7, 9).double()).detach())
    torch.testing.assert_close(*outputs, rtol=0, atol=0)


def test_masks_of_data_ranks_follow_from_the_seed_of_torch():
    run_ranks(_only_torch_is_seeded, 2)


def _data_ranks(seeded_apart):
    layout = _layout({"dp": 2, "w": 2}, {"w": -1}, "dp")
    model = torchtp.parallelize(_model(), layout, output="full")
    x = torch.randn(3, 2, 7, 9, dtype=torch.float64)
    torch.manual_seed(dist.get_rank() if seeded_apart else 0)
    outputs = [model(x).detach() for _ in range(2)]
    assert not torch.equal(outputs[0], outputs[1])
    return layout.data_rank, outputs


@pytest.mark.parametrize("seeded_apart", [False, True])
def test_data_ranks_differ_in_masks_and_their_spatial_ranks_agree(seeded_apart):
    results = run_ranks(_data_ranks, 4, seeded_apart)
    first, second = ([outputs for data_rank, outputs in results if data_rank == which] for which in (0, 1))
    for step in range(2):
        assert torch.equal(first[0][step], first[1][step]) and torch.equal(second[0][step], second[1][step])
        assert not torch.equal(first[0][step], second[0][step])
