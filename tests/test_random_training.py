"""Random training programs on cut images, and on several data ranks, have the numbers of one device."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from models import make_layout
from random_training import Program

from torchtp.testing import run_ranks

MESHES = [{"h": 2, "w": 2}, {"dp": 2, "w": 2}]


def is_stable(once, again):
    """Whether rounding changes no more than rounding; an optimizer may also run away."""
    return all(
        torch.allclose(a, b, 1e-9, 1e-10) and (b.abs() < 1e4).all() for (_, a), (_, b) in zip(again, once, strict=True)
    )


def train(axes, seeds):
    """How many of the programs could be compared."""
    warnings.simplefilter("ignore")
    layout = make_layout(axes)
    num_compared = 0
    for seed in seeds:
        single = Program(seed, None, layout.num_data)
        expected = single.run()
        if not is_stable(expected, Program(seed, None, layout.num_data, noise=1e-13).run()):
            continue
        num_compared += 1
        got = Program(seed, layout, layout.num_data).run()
        assert [name for name, _ in got] == [name for name, _ in expected], seed
        for (name, mine), (_, reference) in zip(got, expected, strict=True):
            text = f"seed {seed} ({single.ways}): {name}"
            torch.testing.assert_close(
                mine, reference, rtol=1e-7, atol=1e-8, msg=lambda why, text=text: f"{text}: {why}"
            )
    return num_compared


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_random_training(axes):
    assert run_ranks(train, 4, axes, range(10), backend="torchtp", timeout=120)[0] >= 8


@pytest.mark.long
@pytest.mark.parametrize("part", range(10))
@pytest.mark.parametrize("axes", [*MESHES, {"h": 3}, {"dp": 3, "w": 2}], ids=str)
def test_more_random_training(axes, part):
    size = math.prod(axes.values())
    seeds = range(10 + 20 * part, 30 + 20 * part)
    assert run_ranks(train, size, axes, seeds, backend="torchtp", timeout=400)[0] >= 12
