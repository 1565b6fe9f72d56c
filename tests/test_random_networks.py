"""Random networks, cut, have the outputs and gradients of one device, by the same steps on all ranks."""

from __future__ import annotations

import copy
import math
import warnings
from itertools import zip_longest

import pytest
import torch
import torch.nn.functional as F
from models import make_layout
from operators import Steps
from random_graphs import RandomGraph, random_graph
from random_mixtures import random_mixture
from random_networks import Call, random_network
from random_sequences import random_sequence
from random_videos import attention_over_places, random_video
from ranks_device import moved
from rules import assert_same
from torch import nn

import torchtp
from torchtp.testing import run_ranks

MESHES = [{"h": 3}, {"w": 4}, {"h": 2, "w": 2}]


def step(network, image, penalized=False):
    torch.manual_seed(7)
    image = image.detach().clone().requires_grad_()
    output = network(image)
    weight = moved(torch.rand(output.shape, generator=torch.Generator().manual_seed(2), dtype=output.dtype))
    loss, first = (output * weight).sum(), []
    if penalized:
        first = torch.autograd.grad(loss, image, create_graph=True)
        loss = loss + sum((one * (1 + one.detach().cos())).sum() + one.square().mean() for one in first)
    loss.backward()
    trained = (parameter.grad for parameter in network.parameters() if parameter.grad is not None)
    return [output.detach(), image.grad, *trained, *(one.detach() for one in first)]


def is_stable(network, image, expected, penalized):
    """Whether rounding changes no more than rounding: a maximum of equal values, or a kink in a constant region, may go either way."""
    disturbed = copy.deepcopy(network)
    if isinstance(disturbed, RandomGraph):
        disturbed.noise = 1e-13
    pairs = zip(step(disturbed, image * (1 + 1e-13), penalized), expected, strict=True)
    return all((a - b).abs().max() < 1e-9 * (1 + b.abs().max()) for a, b in pairs)


def of_one_device(network, image, penalized):
    """None where one device can't tell."""
    single = copy.deepcopy(network)
    # of a single image PyTorch's own is wrong for some orders in memory, which second derivatives meet: docs/spatial.md
    if penalized and len(image) == 1 and any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in single.modules()):
        return None
    try:
        expected = step(single, image, penalized)
    except RuntimeError:
        if not penalized:
            raise
        return None  # what has no second derivative
    return expected if is_stable(network, image, expected, penalized) else None


def run_networks(make, axes, seeds, penalized=False):
    """The steps that were taken for each seed."""
    warnings.simplefilter("ignore")
    layout = make_layout(axes)
    taken = []
    for seed in seeds:
        network, image = map(moved, make(seed))
        expected = of_one_device(network, image, penalized)
        if expected is None:
            taken.append([])
            continue
        steps = Steps()
        with steps:
            got = step(torchtp.parallelize(network, layout, output="full"), image, penalized)
        trained = (name for name, parameter in network.named_parameters() if parameter.grad is not None)
        names = [
            "output",
            *(f"gradient of {name}" for name in ("the image", *trained)),
            *["first gradient"] * penalized,
        ]
        for name, mine, reference in zip(names, got, expected, strict=True):
            assert_same(f"seed {seed}: {name}", mine, reference, 1e-7 if penalized else 1e-8)
        taken.append(steps.taken)
    return taken


def assert_alike(make, axes, seeds, timeout, penalized=False):
    first, *others = run_ranks(
        run_networks, math.prod(axes.values()), make, axes, seeds, penalized, backend="torchtp", timeout=timeout
    )
    least = 0.3 if penalized else 0.8
    assert sum(map(bool, first)) > least * len(seeds), "most networks are compared"
    for seed, *steps in zip(seeds, first, *others, strict=True):
        parted = next((pair for pair in zip_longest(*steps) if len(set(pair)) > 1), None)
        assert parted is None, f"seed {seed}: ranks part at {parted}"


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("make", [random_network, random_graph, random_mixture])
def test_random_networks(make, axes):
    assert_alike(make, axes, range(60), 120)


@pytest.mark.parametrize("axes", [{"h": 6}, {"h": 2, "w": 4}], ids=str)
def test_random_networks_on_many_ranks(axes):
    """Some of which hold nothing of some activations; the last two once parted on these meshes."""
    assert_alike(random_network, axes, [*range(20), 91000, 95011], 120)


def test_strides_of_one_channel_on_a_rank_with_one_row():
    """They say nothing, and a convolution chooses by them how its result lies."""
    assert_alike(random_network, {"h": 3}, [1952], 60)


def attention_of_few_channels(seed):
    torch.manual_seed(seed)
    network = nn.Sequential(
        nn.Conv3d(2, 4, 1, (1, 2, 1)),
        Call(lambda x: F.local_response_norm(x, 3)),
        Call(attention_over_places, nn.Linear(4, 12)),
    )
    return network.double(), torch.randn(1, 2, 1, 2, 5).double()


def test_strides_of_attention_where_a_rank_holds_no_channels():
    """What it keeps for backward says nothing there."""
    assert_alike(attention_of_few_channels, {"h": 2, "w": 3}, [0], 60)


@pytest.mark.long
@pytest.mark.parametrize("part", range(20))
@pytest.mark.parametrize("axes", [*MESHES, {"h": 2, "w": 4}], ids=str)
@pytest.mark.parametrize("make", [random_network, random_graph, random_mixture])
def test_more_random_networks(make, axes, part):
    assert_alike(make, axes, range(60 + part * 100, 160 + part * 100), 600)


@pytest.mark.parametrize("axes", [{"h": 3}, {"h": 2, "w": 2}], ids=str)
def test_random_sequences(axes):
    assert_alike(random_sequence, axes, range(30), 120)


@pytest.mark.long
@pytest.mark.parametrize("part", range(6))
@pytest.mark.parametrize("axes", [{"w": 3}, {"h": 2, "w": 2}, {"h": 2, "w": 3}, {"w": 2, "h": 2}], ids=str)
def test_more_random_sequences(axes, part):
    assert_alike(random_sequence, axes, range(40 + part * 100, 140 + part * 100), 600)


@pytest.mark.parametrize("axes", [{"h": 2, "w": 2}, {"w": 3}], ids=str)
def test_random_videos(axes):
    assert_alike(random_video, axes, range(30), 120)


@pytest.mark.long
@pytest.mark.parametrize("part", range(6))
@pytest.mark.parametrize("axes", [{"h": 2, "w": 2}, {"h": 5}, {"h": 2, "w": 3}], ids=str)
def test_more_random_videos(axes, part):
    assert_alike(random_video, axes, range(30 + part * 100, 130 + part * 100), 600)


@pytest.mark.parametrize("axes", [{"h": 3}, {"h": 2, "w": 2}], ids=str)
@pytest.mark.parametrize("make", [random_network, random_video])
def test_second_derivatives_of_random_networks(make, axes):
    assert_alike(make, axes, range(15), 120, penalized=True)


@pytest.mark.long
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("axes", [{"h": 3}, {"h": 2, "w": 2}, {"h": 2, "w": 3}], ids=str)
@pytest.mark.parametrize("make", [random_network, random_graph, random_sequence, random_video])
def test_more_second_derivatives(make, axes, part):
    assert_alike(make, axes, range(15 + part * 50, 65 + part * 50), 600, penalized=True)
