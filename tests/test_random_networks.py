"""Random networks, cut, have the outputs and gradients of one device, by the same steps on all ranks."""

from __future__ import annotations

import copy
import math
import warnings
from itertools import zip_longest

import pytest
import torch
from models import make_layout
from operators import Steps
from random_graphs import RandomGraph, random_graph
from random_networks import random_network
from random_sequences import random_sequence
from ranks_device import moved
from rules import assert_same

import torchtp
from torchtp.testing import run_ranks

MESHES = [{"h": 3}, {"w": 4}, {"h": 2, "w": 2}]


def step(network, image):
    torch.manual_seed(7)
    image = image.detach().clone().requires_grad_()
    output = network(image)
    weight = moved(torch.rand(output.shape, generator=torch.Generator().manual_seed(2), dtype=output.dtype))
    (output * weight).sum().backward()
    return [output.detach(), image.grad, *(one.grad for one in network.parameters() if one.grad is not None)]


def is_stable(network, image, expected):
    """Whether rounding changes no more than rounding: a maximum of equal values, or a kink in a constant region, may go either way."""
    disturbed = copy.deepcopy(network)
    if isinstance(disturbed, RandomGraph):
        disturbed.noise = 1e-13
    pairs = zip(step(disturbed, image * (1 + 1e-13)), expected, strict=True)
    return all((a - b).abs().max() < 1e-9 * (1 + b.abs().max()) for a, b in pairs)


def run_networks(make, axes, seeds):
    """The steps that were taken for each seed."""
    warnings.simplefilter("ignore")
    layout = make_layout(axes)
    taken = []
    for seed in seeds:
        network, image = map(moved, make(seed))
        expected = step(copy.deepcopy(network), image)
        if not is_stable(network, image, expected):
            taken.append([])
            continue
        steps = Steps()
        with steps:
            got = step(torchtp.parallelize(network, layout, output="full"), image)
        trained = (name for name, parameter in network.named_parameters() if parameter.grad is not None)
        names = ["output", *(f"gradient of {name}" for name in ("the image", *trained))]
        for name, mine, reference in zip(names, got, expected, strict=True):
            assert_same(f"seed {seed}: {name}", mine, reference, 1e-8)
        taken.append(steps.taken)
    return taken


def assert_alike(make, axes, seeds, timeout):
    first, *others = run_ranks(
        run_networks, math.prod(axes.values()), make, axes, seeds, backend="torchtp", timeout=timeout
    )
    assert sum(map(bool, first)) > 0.8 * len(seeds), "nearly all networks are compared"
    for seed, *steps in zip(seeds, first, *others, strict=True):
        parted = next((pair for pair in zip_longest(*steps) if len(set(pair)) > 1), None)
        assert parted is None, f"seed {seed}: ranks part at {parted}"


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("make", [random_network, random_graph])
def test_random_networks(make, axes):
    assert_alike(make, axes, range(60), 120)


@pytest.mark.parametrize("axes", [{"h": 6}, {"h": 2, "w": 4}], ids=str)
def test_random_networks_on_many_ranks(axes):
    """Some of which hold nothing of some activations; the last two once parted on these meshes."""
    assert_alike(random_network, axes, [*range(20), 91000, 95011], 120)


def test_strides_of_one_channel_on_a_rank_with_one_row():
    """They say nothing, and a convolution chooses by them how its result lies."""
    assert_alike(random_network, {"h": 3}, [1952], 60)


@pytest.mark.long
@pytest.mark.parametrize("part", range(20))
@pytest.mark.parametrize("axes", [*MESHES, {"h": 2, "w": 4}], ids=str)
@pytest.mark.parametrize("make", [random_network, random_graph])
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
