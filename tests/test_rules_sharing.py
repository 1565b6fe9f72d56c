"""Plain tensors that meet cut activations outside of parallelize get plain gradients by the mean rule."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from rules import DATA_W, H4, HW, W3, assert_same, check, device_mesh_of, mean_over_ranks, num_ranks
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import torchtp
from torchtp.testing import run_ranks

IMAGE = (2, 4, 9, 11)


def angles(x, p):
    """The derivative of atan2 adds the squares of both, the plain one's as well; p has gradients from plain ops besides."""
    made = p.sin()
    return torch.atan2(x, made) * made.exp() + torch.atan2(made * 2, x) + torch.atan2(made, made) * x.sinh().atan2_(p)


CASES = {
    "scale": (lambda x, p: (x * p).sin(), (4, 1, 1)),
    "scalar": (lambda x, p: x * p + p.square(), ()),
    "positions": (lambda x, p: (x + p).sin() * p[:, :1], (1, 4, 9, 11)),
    "rows": (lambda x, p: x.exp() / (1 + p.square()), (9, 1)),
    "where": (lambda x, p: torch.where(x > p, x, p).square(), (4, 1, 1)),
    "cat": (lambda x, p: torch.cat([x, p], 1).sin(), (2, 3, 9, 11)),
    "prelu": (lambda x, p: F.prelu(x, p.abs()), (4,)),
    "embedding": (lambda x, p: F.embedding((x[:, :2] > 0).sum(1), p).permute(0, 3, 1, 2) * x, (3, 4)),
    "angles": (angles, IMAGE),
    "made_plain": (lambda x, p: x + F.conv2d(p.sin(), torch.ones(4, 2, 3, 3).double(), padding=1), (1, 2, 9, 11)),
    "masked_scatter": (lambda x, p: x.masked_scatter(x > 0, p).sin() + p.masked_scatter(x > 1, x), IMAGE),
    "masked_select": (lambda x, p: p.masked_select(x > 0).sin(), IMAGE),
    "index_add": (lambda x, p: x.index_add(2, torch.tensor([3, 1, 3]), p, alpha=2).sin(), (2, 4, 3, 11)),
    "classes": (lambda x, p: F.cross_entropy(p, (x[:, 0] > 0).long()), IMAGE),
    "pooled": (lambda x, p: F.adaptive_avg_pool2d(x, 1) * p, (4, 1, 1)),
}


def mark(mesh):
    torchtp.dtensor.mark(device_mesh_of(mesh[0]), [axis for axis, dim in enumerate(mesh[1]) if dim])


def run_case(name, mesh):
    mark(mesh)
    torch.manual_seed(0)
    fn, shape = CASES[name]
    check(fn, mesh, [torch.randn(IMAGE).double()], [torch.randn(shape).double()], double=False)


@pytest.mark.parametrize("mesh", [W3, H4, HW, DATA_W], ids=["w3", "h4", "h2_w2", "data_w"])
@pytest.mark.parametrize("name", CASES)
def test_plain_tensors_obey_the_mean_rule(name, mesh):
    run_ranks(run_case, num_ranks(mesh), name, mesh)


def run_second_order(name):
    mark(W3)
    torch.manual_seed(0)
    fn, shape = CASES[name]
    check(fn, W3, [torch.randn(IMAGE).double()], [torch.randn(shape).double()], double=True, gathers=True)


@pytest.mark.parametrize("name", ["scale", "rows", "positions"])
def test_second_gradients_of_plain_tensors_are_plain(name):
    run_ranks(run_second_order, 3, name)


def run_through_a_gradient():
    """A penalty on the gradient of a plain parameter, which every rank has averaged first."""
    mark(W3)
    mesh = device_mesh_of(W3[0])
    torch.manual_seed(0)
    x, gamma = torch.randn(IMAGE).double(), torch.randn(4, 1, 1).double()
    single, mine = gamma.clone().requires_grad_(), gamma.clone().requires_grad_()
    theirs = x.clone().requires_grad_()
    (wanted,) = torch.autograd.grad((theirs * single).square().sum(), single, create_graph=True)
    wanted.sin().sum().backward()
    cut = distribute_tensor(x, mesh, [Shard(3)], src_data_rank=None).requires_grad_()
    (share,) = torch.autograd.grad((cut * mine).square().sum(), mine, create_graph=True)
    assert not isinstance(share, DTensor)
    assert_same("gradient", mean_over_ranks(share), wanted)
    share.backward(wanted.detach().cos())
    assert_same("second gradient of the image", cut.grad.full_tensor(), theirs.grad)
    assert_same("second gradient of the parameter", mean_over_ranks(mine.grad), single.grad)


def test_a_gradient_of_a_plain_parameter_can_be_differentiated():
    run_ranks(run_through_a_gradient, 3)


def run_computed_again():
    """A checkpoint computes the sum of an image and a plain tensor of its shape again inside the backward."""
    mark(W3)
    torch.manual_seed(0)

    def part(x, p):
        return (x + p).sin() * (F.adaptive_avg_pool2d(x, 1) + p.mean((2, 3), keepdim=True))

    fn = functools.partial(checkpoint, part, use_reentrant=False)
    check(fn, W3, [torch.randn(IMAGE).double()], [torch.randn(IMAGE).double()], double=False)


def test_a_sum_that_is_computed_again_is_no_sum_of_gradients():
    run_ranks(run_computed_again, 3)


def run_group_norm_penalty():
    mark(W3)
    mesh = device_mesh_of(W3[0])
    torch.manual_seed(0)
    x = torch.randn(IMAGE).double()
    results = []
    for image in (x.clone(), distribute_tensor(x, mesh, [Shard(3)], src_data_rank=None)):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU(), nn.BatchNorm2d(4)).double()
        nn.init.normal_(net[1].weight)
        image.requires_grad_()
        (gradient,) = torch.autograd.grad(net(image).square().sum(), image, create_graph=True)
        gradient.square().sum().backward()
        results.append({name: p.grad for name, p in net.named_parameters()})
    for name, wanted in results[0].items():
        got = results[1][name]
        assert got is None or not isinstance(got, DTensor), f"{name} has a DTensor gradient"
        assert_same(name, torch.zeros_like(wanted) if got is None else mean_over_ranks(got), wanted, 1e-9)


def test_parameters_of_norms_get_plain_gradients_from_a_gradient_penalty():
    run_ranks(run_group_norm_penalty, 3)


def run_counted():
    """Of a dispatch mode the rules see no more than that it stands between the engine and them."""
    mark(W3)
    torch.manual_seed(0)
    image, parameter = torch.randn(IMAGE).double(), torch.randn(IMAGE).double()
    flops = []
    for fn in (
        CASES["positions"][0],
        lambda x, p: (x * p + p.exp()).sin() * (x + F.conv2d(p, torch.ones(4, 4, 1, 1).double())),
    ):
        with FlopCounterMode(display=False) as counter:
            check(fn, W3, [image], [parameter], double=False)
        flops.append(counter.get_total_flops())
    return flops


def test_operations_are_counted_without_changing_gradients():
    assert all(flops[1] > 0 for flops in run_ranks(run_counted, 3))
