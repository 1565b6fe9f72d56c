"""Random graphs of which a part is computed outside of the parallelized module, on what it gave out, have the numbers of one device."""

from __future__ import annotations

import copy
import math
import random
import warnings

import pytest
import torch
from models import make_layout
from random_graphs import RandomGraph, random_graph
from random_mixtures import random_mixture
from ranks_device import moved
from rules import assert_same
from torch import Tensor, nn

import torchtp
from torchtp.testing import run_ranks

# How the gradients of what was given out, and of what is made of that, are looked at.
WAYS = ["not", "kept", "asked for", "hooked", "of two losses"]


class Inside(nn.Module):
    """The first steps of a graph, of which it gives out every tensor."""

    def __init__(self, graph: RandomGraph, draw: random.Random):
        super().__init__()
        self.graph, self.number = graph, draw.randint(0, len(graph.steps))
        self.way, self.noticed = draw.choice(WAYS), [draw.random() < 0.3 for _ in range(graph.num_tensors)]

    def forward(self, image: Tensor) -> list[Tensor]:
        tensors = self.graph.begin(image)
        self.graph.go_on(tensors, self.graph.steps[: self.number])
        self.made = list(tensors)
        return tensors

    def step(self, network: nn.Module, image: Tensor, target: Tensor) -> list[Tensor]:
        """The loss and all gradients, by `network`, which is this module or what became of it."""
        torch.manual_seed(7)
        image = image.detach().clone().requires_grad_()
        tensors = list(network(image))
        # What was cut otherwise than images are is another tensor outside: its gradient is of what is made of it there.
        self.noticed = [
            notice and (n >= len(self.made) or tensors[n] is self.made[n]) for n, notice in enumerate(self.noticed)
        ]
        tensors[0] = tensors[0] * (1 + target)
        self.graph.go_on(tensors, self.graph.steps[self.number :])
        loss = torch.stack([(t * t).mean() + t.mean() for t in tensors]).sum()
        noticed = [t for t, notice in zip(tensors, self.noticed, strict=True) if notice and t.requires_grad]
        seen = {}
        if self.way == "kept":
            for tensor in noticed:
                tensor.retain_grad()
        if self.way == "asked for":
            seen = dict(enumerate(torch.autograd.grad(loss, noticed, retain_graph=True) if noticed else ()))
        if self.way == "hooked":
            for n, tensor in enumerate(noticed):
                tensor.register_hook(lambda gradient, n=n: seen.update({n: gradient.detach()}) or gradient * 1.25)
        if self.way == "of two losses":
            tensors[1].square().mean().backward(retain_graph=True)
        loss.backward()
        if self.way == "kept":
            seen = {n: tensor.grad for n, tensor in enumerate(noticed)}
        trained = [parameter.grad for parameter in self.parameters()]
        return [loss.detach(), image.grad, *trained, *(seen[n] for n in sorted(seen))]


def run_graphs(make, axes, seeds):
    """How many are compared."""
    warnings.simplefilter("ignore")
    layout = make_layout(axes)
    compared = 0
    for seed in seeds:
        graph, image = map(moved, make(seed))
        inside = Inside(graph, random.Random(seed))
        target = torch.rand(graph.embed(image).shape, dtype=image.dtype)
        plain = copy.deepcopy(inside)
        results = inside.step(torchtp.parallelize(inside, layout), image, layout.shard(target))
        plain.noticed = inside.noticed
        disturbed = copy.deepcopy(plain)
        disturbed.graph.noise = 1e-13
        expected = plain.step(plain, image, target)
        again = disturbed.step(disturbed, image * (1 + 1e-13), target)
        if any((a - b).abs().max() > 1e-9 * (1 + b.abs().max()) for a, b in zip(again, expected, strict=True)):
            continue  # a maximum of equal values, or a kink, may go either way
        for number, (mine, reference) in enumerate(zip(results, expected, strict=True)):
            assert_same(f"seed {seed}: result {number}, {inside.way}", layout.full(mine), reference, 1e-8)
        compared += 1
    return compared


def assert_alike(make, axes, seeds, timeout):
    compared = run_ranks(run_graphs, math.prod(axes.values()), make, axes, seeds, backend="torchtp", timeout=timeout)
    assert min(compared) > 0.7 * len(seeds), "most graphs are compared"


@pytest.mark.parametrize("axes", [{"h": 3}, {"h": 2, "w": 2}], ids=str)
@pytest.mark.parametrize("make", [random_graph, random_mixture])
def test_random_graphs_outside(make, axes):
    assert_alike(make, axes, range(40), 120)


@pytest.mark.long
@pytest.mark.parametrize("part", range(10))
@pytest.mark.parametrize("axes", [{"w": 3}, {"h": 4}, {"h": 2, "w": 3}], ids=str)
@pytest.mark.parametrize("make", [random_graph, random_mixture])
def test_more_random_graphs_outside(make, axes, part):
    assert_alike(make, axes, range(40 + part * 100, 140 + part * 100), 600)
