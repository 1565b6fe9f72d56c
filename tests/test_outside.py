"""Gradients of tensors that a forward takes from elsewhere than its parameters and arguments: fast weights that are kept on modules."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from models import make_layout
from torch import nn
from training import assert_same_gradients, loss_of, make_images

import torchtp
from torchtp.testing import run_ranks

AXES = [{"w": 2}, {"h": 2, "w": 2}]


class Fast(nn.Module):
    """Two convolutions and a gain, with others in their place where there are."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 2, 3, padding=1)
        self.gain = nn.Parameter(torch.tensor([0.3, -0.4, 0.5]).view(3, 1, 1))
        self.fast = {}

    def slow(self):
        return {"first": self.first.weight, "last": self.last.weight, "gain": self.gain}

    def forward(self, x):
        weights = {**self.slow(), **self.fast}
        x = F.conv2d(x, weights["first"], self.first.bias, padding=1).tanh() * weights["gain"]
        return F.conv2d(x * self.gain.exp(), weights["last"], self.last.bias, padding=1)


def _made_of_parameters(model):
    """Two steps of the first order: what is taken is not differentiated again."""
    model.fast, told = {}, []
    for step in range(2):
        fast = {**model.slow(), **model.fast}
        taken = torch.autograd.grad(loss_of(model(make_images(step, 2))), list(fast.values()))
        model.fast = {name: one - 0.3 * grad for (name, one), grad in zip(fast.items(), taken, strict=True)}
        told += taken
    loss_of(model(make_images(2, 2))).backward()
    return told


def _leaves(model):
    """An optimizer of the user's own, whose parameters are none of the module's."""
    model.fast = {name: one.detach().clone().requires_grad_() for name, one in model.slow().items()}
    optimizer = torch.optim.Adam(list(model.fast.values()), lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model(make_images(step, 2))).backward()
        optimizer.step()
    return [*(one.grad for one in model.fast.values()), *(one.detach() for one in model.fast.values())]


def _train(program, axes):
    torch.manual_seed(1)
    single = Fast().double()
    model = torchtp.parallelize(copy.deepcopy(single), make_layout(axes), output="full")
    expected, told = program(single), program(model)
    torch.testing.assert_close(told, expected, rtol=1e-9, atol=1e-10)
    assert_same_gradients(model, single)


@pytest.mark.parametrize("axes", AXES, ids=str)
@pytest.mark.parametrize("program", [_made_of_parameters, _leaves])
def test_tensors_from_outside_have_gradients_not_contributions(program, axes):
    run_ranks(_train, math.prod(axes.values()), program, axes)
