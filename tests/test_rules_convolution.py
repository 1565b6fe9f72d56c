"""Convolutions of cut DTensors equal the single device, to second order, with plain and with DTensor weights."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from models import make_layout
from rules import DATA_W, H2, H4, HW, REPLICA_H, W2, check, num_ranks
from torch import nn

import torchtp
from torchtp.testing import run_ranks

CASES = {
    "same": (lambda x, w, b: F.conv2d(x, w, b, padding=1), (2, 3, 9, 11), (4, 3, 3, 3)),
    "stem": (lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=3), (2, 3, 13, 10), (4, 3, 7, 7)),
    "valid": (lambda x, w, b: F.conv2d(x, w, b), (1, 3, 9, 7), (4, 3, 3, 3)),
    "valid_by_name": (lambda x, w, b: F.conv2d(x, w, b, padding="valid"), (1, 3, 9, 7), (4, 3, 3, 3)),
    "dilated": (lambda x, w, b: F.conv2d(x, w, b, padding=2, dilation=2), (2, 3, 7, 9), (4, 3, 3, 3)),
    "grouped": (lambda x, w, b: F.conv2d(x, w, b, padding=1, groups=2), (2, 4, 6, 7), (6, 2, 3, 3)),
    "depthwise": (lambda x, w, b: F.conv2d(x, w, b, padding=3, groups=4), (2, 4, 6, 9), (4, 1, 7, 7)),
    "pointwise": (lambda x, w, b: F.conv2d(x, w, b), (2, 3, 5, 7), (4, 3, 1, 1)),
    "patches": (lambda x, w, b: F.conv2d(x, w, b, stride=4), (2, 3, 16, 12), (4, 3, 4, 4)),
    "twice": (
        lambda x, w, b: F.conv2d(F.conv2d(x, w, b, padding=1).sin(), w, b, padding=1),
        (2, 3, 7, 9),
        (3, 3, 3, 3),
    ),
    "transposed": (lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2), (2, 3, 5, 6), (3, 4, 2, 2)),
    "transposed_padded": (
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, padding=1, output_padding=1),
        (2, 3, 5, 6),
        (3, 4, 3, 3),
    ),
}


def run_case(name, mesh, plain):
    torch.manual_seed(0)
    fn, x, w = CASES[name]
    channels = w[1] if name.startswith("transposed") else w[0]
    check(fn, mesh, [torch.randn(x).double()], [torch.randn(w).double(), torch.randn(channels).double()], plain)


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "dtensor"])
@pytest.mark.parametrize("name", CASES)
def test_convolution_cut_over_two_ranks_matches_reference(name, plain):
    run_ranks(run_case, 2, name, W2, plain)
    run_ranks(run_case, 2, name, H2, plain)


@pytest.mark.parametrize("mesh", [HW, H4, DATA_W, REPLICA_H], ids=["h_and_w", "empty_shards", "data_and_w", "replica"])
@pytest.mark.parametrize("name", ["same", "stem", "depthwise", "twice", "transposed_padded"])
def test_convolution_on_larger_meshes_matches_reference(name, mesh):
    run_ranks(run_case, num_ranks(mesh), name, mesh, True)


def run_1d_and_3d():
    torch.manual_seed(0)
    mesh = ((2,), (2,))
    w1, w3 = torch.randn(4, 3, 3).double(), torch.randn(4, 3, 3, 3, 3).double()
    check(lambda x, w: F.conv1d(x, w, padding=1), mesh, [torch.randn(2, 3, 9).double()], [w1])
    check(lambda x, w: F.conv3d(x, w, padding=1), ((2,), (4,)), [torch.randn(1, 3, 4, 5, 7).double()], [w3])
    check(lambda x, w: F.conv_transpose3d(x, w.transpose(0, 1)), mesh, [torch.randn(1, 3, 4, 5, 7).double()], [w3])


def test_convolutions_in_one_and_three_dims_match_reference():
    run_ranks(run_1d_and_3d, 2)


def run_images_without_gradient(make, trained):
    """The gradient of a function of p.grad, where nothing but parameters is trained."""
    torch.manual_seed(0)
    layer, image = make().double(), torch.randn(2, 3, 9, 12).double()
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name in trained)
    single = copy.deepcopy(layer)
    found = []
    for module in (single, torchtp.parallelize(layer, make_layout({"w": 2}), output="full")):
        module(image).pow(3).sum().backward(create_graph=True)
        grads = [p.grad for p in module.parameters() if p.requires_grad]
        module.zero_grad()
        sum((grad * grad.detach()).sum() for grad in grads).backward()
        found.append([p.grad.detach() for p in module.parameters() if p.requires_grad])
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("trained", [("weight", "bias"), ("weight",), ("bias",)])
@pytest.mark.parametrize(
    "make",
    [
        partial(nn.Conv2d, 3, 4, 3, padding=1),
        partial(nn.Conv2d, 3, 3, 5, padding=2, groups=3),
        partial(nn.ConvTranspose2d, 3, 4, 2, stride=2),
    ],
    ids=["dense", "depthwise", "transposed"],
)
def test_second_derivative_where_images_take_no_gradient(make, trained):
    run_ranks(run_images_without_gradient, 2, make, trained)


def run_refused():
    layout = make_layout({"w": 2})
    image = torch.randn(2, 8, 9, 12)
    for make in (
        partial(nn.Conv2d, 8, 8, 3, stride=0, padding=1),
        partial(nn.Conv2d, 8, 8, 3, stride=0, padding=1, groups=8),
        partial(nn.ConvTranspose2d, 8, 8, 3, stride=0),
        partial(torchtp.nn.Conv2d, 8, 8, 3, stride=0, padding=1, padding_mode="circular"),
    ):
        with pytest.raises(ValueError, match="stride (and dilation )?must be positive, got"):
            torchtp.parallelize(make(), layout)(image)
    with pytest.raises(ValueError, match="dilation must be positive, got"):
        torchtp.parallelize(nn.Conv2d(8, 8, 3, dilation=0), layout)(image)


def test_strides_of_zero_are_refused():
    run_ranks(run_refused, 2)
