"""What people's own Functions make of parameters (quantized, binarized weights) is of the graph: hooks, gradients, writes, a second use."""

from __future__ import annotations

import copy

import pytest
import torch
from models import make_layout
from torch import nn

import torchtp
from torchtp.testing import run_ranks


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * x * x * grad.clamp(-0.02, 0.02)  # which of a sum is not the sum


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        return grad * b, grad * a


def hooked(network, x):
    made = Cubed.apply(network.weight)
    made.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    return x * made, made


def asked_for_inside(network, x):
    made = Cubed.apply(network.weight)
    with torch.enable_grad():
        (slope,) = torch.autograd.grad((made * x).square().sum(), made, create_graph=True)
    return x * made * slope, made


def written(network, x):
    made = Cubed.apply(network.weight * 1.0)
    made[:, :, 0] = 0
    made.mul_(2)
    return x * made, made


def scaled_by_what_is_cut(network, x):
    made = Cubed.apply(network.weight * 1.0)
    made.mul_(x.mean())
    return x * made, made


def used_twice(network, x):
    made = Cubed.apply(network.weight)
    return Product.apply(made, x) + x * made, made.square()


def of_another_function(network, x):
    made = Cubed.apply(network.weight)
    return Product.apply(made, x), (made * made).mean()


def of_a_canvas(network, x):
    canvas = torch.zeros_like(network.weight)
    canvas[:, :, 1:3] = network.weight[:, :, 1:3]
    with torch.enable_grad():
        (slope,) = torch.autograd.grad((canvas * x).square().sum(), canvas, create_graph=True)
    return x * canvas * slope, slope.mean()


class Network(nn.Module):
    def __init__(self, use):
        super().__init__()
        self.use = use
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.weight = nn.Parameter(torch.linspace(-1, 1, 4 * 7 * 9).view(1, 4, 7, 9))

    def forward(self, x):
        return self.use(self, self.first(x))


def step(network, image, after, full):
    """All gradients; `after` is what is done with what came beside the output."""
    torch.manual_seed(1)
    y, made = network(image)
    seen = []
    loss = full(y).square().mean() + full(made).square().mean()
    if after == "hook":
        made.register_hook(lambda grad: seen.append(full(grad).clone()) or grad.clamp(-1e-3, 1e-3))
        made.retain_grad()
    if after == "autograd.grad":
        (grad,) = torch.autograd.grad(loss, made, create_graph=True)
        seen.append(full(grad).detach())
        loss = loss + full(grad).square().sum()
    loss.backward()
    if after == "hook":
        seen.append(full(made.grad))
    return [loss.detach(), *(parameter.grad.clone() for parameter in network.parameters()), *seen]


def run(use, after, axes):
    torch.manual_seed(0)
    layout, single = make_layout(axes), Network(use).double()
    image = torch.randn(2, 2, 7, 9, dtype=torch.float64)
    model = torchtp.parallelize(copy.deepcopy(single), layout)
    got, wanted = (step(network, image, after, layout.full) for network in (model, single))
    for mine, expected in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-9, atol=1e-12)


USES = [hooked, asked_for_inside, written, scaled_by_what_is_cut, used_twice, of_another_function, of_a_canvas]


@pytest.mark.parametrize("axes", [{"w": 2}, {"h": 2, "w": 2}], ids=str)
@pytest.mark.parametrize("after", ["nothing", "hook", "autograd.grad"])
@pytest.mark.parametrize("use", USES)
def test_what_functions_make_of_parameters(use, after, axes):
    run_ranks(run, 2 * len(axes), use, after, axes)
