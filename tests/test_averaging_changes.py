"""Parameters that one rank alone froze, and whose gradients are averaged once an outer module is gone."""

import pytest
import torch
import torch.distributed as dist
from models import make_layout
from torch import nn

import torchtp
from torchtp.testing import run_ranks

LIMIT = 40.0


def _frozen_later():
    model = torchtp.parallelize(nn.Sequential(nn.Conv2d(3, 2, 3), nn.Conv2d(2, 2, 3)), make_layout({"w": 2}))
    x = torch.rand(1, 3, 8, 8)

    def gradients():
        model.zero_grad()
        model(x).sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    gradients()
    before = gradients()
    model[1].requires_grad_(dist.get_rank() == 0)
    with pytest.raises(ValueError) as caught:
        model(x)
    model[1].requires_grad_()
    assert all(map(torch.equal, gradients(), before))  # thawed, it trains on
    return str(caught.value)


def test_parameters_that_one_rank_alone_froze():
    first, second = run_ranks(_frozen_later, 2, timeout=LIMIT)
    assert first == second and "rank 1 calls it in training, with 2 parameters frozen ('1.weight' to '1.bias')" in first


def _after_an_outer_one():
    torch.manual_seed(0)
    single = nn.Sequential(nn.Conv2d(3, 2, 3, padding=1), nn.ReLU()).double()
    x = torch.rand(1, 3, 8, 8).double()
    single(x).square().mean().backward()
    expected = [parameter.grad.clone() for parameter in single.parameters()]
    single.zero_grad()
    layout = make_layout({"w": 2})
    inner = torchtp.parallelize(single, layout, output="full")
    for keeps in (True, False):
        outer = torchtp.parallelize(nn.Sequential(inner), layout, output="full")
        outer(x).square().mean().backward()
        inner.zero_grad()
        kept = outer if keeps else None
        del outer
        inner(x).square().mean().backward()
        for parameter, grad in zip(inner.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, grad, rtol=1e-9, atol=1e-12)
        inner.zero_grad()
        del kept


def test_gradients_are_averaged_when_an_outer_module_is_gone():
    run_ranks(_after_an_outer_one, 2, timeout=LIMIT)


def _freeze_as_many():
    model = torchtp.parallelize(nn.Sequential(*(nn.Conv2d(2, 2, 3) for _ in range(4))), make_layout({"w": 2}))
    x = torch.rand(1, 2, 12, 12)
    for _ in range(2):  # the next forward compares no values
        model(x).sum().backward()
    for index in (0, 1 + dist.get_rank(), 3):
        model[index].requires_grad_(False)
    with pytest.raises(ValueError) as caught:
        model(x)
    return str(caught.value)


def test_as_many_frozen_parameters_that_are_others():
    first, second = run_ranks(_freeze_as_many, 2, timeout=LIMIT)
    assert first == second and "frozen ('0.weight' to '0.bias', '2.weight' to '3.bias')" in first
