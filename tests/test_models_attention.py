"""Networks that attend over pixels train and evaluate on cut images as on one device; along one axis nothing is gathered."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from attention_networks import NETWORKS
from models import make_layout
from rules import assert_same
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

import torchtp
from torchtp.testing import run_ranks

IMAGE = (16, 24)
AXES = [{"w": 2}, {"h": 3}, {"w": 3}, {"h": 2, "w": 2}]


def make(name):
    torch.manual_seed(0)
    return NETWORKS[name]().double()


def images(num):
    return torch.randn(num, 3, *IMAGE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def loss_of(outputs):
    generator = torch.Generator().manual_seed(2)
    leaves = pytree.tree_leaves(outputs)
    return sum((out * torch.randn(out.shape, generator=generator, dtype=out.dtype)).square().mean() for out in leaves)


def results(model, image):
    image = image.clone().requires_grad_()
    outputs = model(image)
    loss_of(outputs).backward()
    leaves = [leaf.detach() for leaf in pytree.tree_leaves(outputs)]
    return leaves, {"image": image.grad, **{name: parameter.grad for name, parameter in model.named_parameters()}}


def compare(name, axes, training, num):
    single = make(name).train(training)
    mine = torchtp.parallelize(copy.deepcopy(single), make_layout(axes), output="full")
    with torchtp.strict() if len(axes) == 1 else contextlib.nullcontext():
        got, gradients = results(mine, images(num))
    expected, wanted = results(single, images(num))
    for number, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert_same(f"output {number}", one, other)
    for key, gradient in gradients.items():
        assert_same(key, gradient, wanted[key])


@pytest.mark.parametrize("axes", AXES, ids=lambda axes: "".join(f"{name}{size}" for name, size in axes.items()))
@pytest.mark.parametrize("name", NETWORKS)
def test_training_matches_one_device(name, axes):
    size = torch.Size(axes.values()).numel()
    run_ranks(compare, size, name, axes, True, 2, backend="torchtp")


@pytest.mark.parametrize("name", NETWORKS)
def test_evaluating_one_image_matches_one_device(name):
    run_ranks(compare, 3, name, {"w": 3}, False, 1, backend="torchtp")


def leave(output):
    """An image that was a sequence of pixels inside leaves cut as the layout says."""
    single, layout = make("segmenting"), make_layout({"w": 2})
    expected = single(images(1))
    model = torchtp.parallelize(copy.deepcopy(single), layout, output=output)
    with torch.no_grad():
        got = model(images(1))
    for key, whole in expected.items():
        part = got[key]
        if output == "dtensor":
            assert isinstance(part, DTensor) and part.placements == layout.placements(part.dim())
            part = part.to_local()
        torch.testing.assert_close(part, whole.detach()[layout.tile(whole.shape)], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("output", ["dtensor", "local"])
def test_images_leave_as_tiles_of_the_layout(output):
    run_ranks(leave, 2, output, backend="torchtp")
