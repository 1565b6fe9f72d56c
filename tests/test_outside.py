"""Gradients of tensors that are none of a parallelized module's: fast weights kept on it, parameters of a loss or a head behind it."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from models import make_layout
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import assert_same_gradients, loss_of, make_images, whole

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


class Loss(nn.Module):
    """A loss with parameters of its own, which meet activations alone, made into something else, and in lists."""

    def __init__(self):
        super().__init__()
        self.scale, self.weights = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.tensor([0.2, -0.3]))
        self.centers, self.plane = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.randn(1, 1, 13, 17))
        self.head = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.GroupNorm(1, 3), nn.PReLU(3))
        self.rows = nn.LSTM(2, 3)

    def forward(self, y):
        pixels = y.movedim(1, 3)
        near = self.centers[(y.detach()[:, 0] * 4).long().clamp(0, 3)]
        loss = (
            (y / self.scale).square().mul(self.weights.view(2, 1, 1).exp()).mean()
            + self.scale.log()
            + self.weights[0] ** 2
        )
        loss = (
            loss
            + (pixels - near).square().mean()
            + torch.cdist(pixels.flatten(0, 2), self.centers).min(1).values.mean()
        )
        loss = loss + torch.cat([y, self.plane.expand(y.size(0), -1, -1, -1)], 1).tanh().square().mean()
        loss = loss + checkpoint(lambda y: self.head(y).tanh().mul(self.scale.exp()).mean(), y, use_reentrant=False)
        loss = loss + self.rows(y.mean(3).permute(2, 0, 1))[0].square().mean()
        return loss + checkpoint(
            lambda y: (y * self.weights.sigmoid().view(2, 1, 1)).square().mean(), y, use_reentrant=True
        )


class Hidden(nn.Module):
    """Forward takes a loss along that is none of its modules."""

    def __init__(self, loss):
        super().__init__()
        self.body, self.losses = Fast(), [loss]

    def forward(self, x):
        return self.losses[0](self.body(x))


class Behind(nn.Module):
    """A body, and a loss that is called on what it gives; only the body is parallelized."""

    def __init__(self, loss):
        super().__init__()
        self.body, self.loss = Fast(), loss

    def forward(self, x):
        return self.loss(self.body(x))


def _loss_of(model):
    return model.losses[0] if isinstance(model, Hidden) else model.loss


def _trained(model):
    loss, told = _loss_of(model), []
    optimizer = torch.optim.SGD({*model.parameters(), *loss.parameters()}, lr=0.05)
    for step in range(2):
        optimizer.zero_grad()
        value = model(make_images(step, 2))
        value.backward()
        told += [whole(value.detach()), *(one.grad.clone() for one in loss.parameters())]
        optimizer.step()
    return told


def _steps(model):
    told, loss = _trained(model), _loss_of(model)
    taken = torch.autograd.grad(model(make_images(2, 2)), list(loss.parameters()), create_graph=True)
    sum(grad.square().sum() for grad in taken).backward()
    return [*told, *taken, *(one.grad for one in loss.parameters())]


def _learn_a_loss(cls, axes, reduced):
    torch.manual_seed(1)
    single = cls(Loss().double()).double()
    model, layout = copy.deepcopy(single), make_layout(axes)
    torchtp.parallelize(model if cls is Hidden else model.body, layout)
    reducer = torchtp.gradients.GradientReducer(_loss_of(model), layout.gradient_group) if reduced else None
    # Gradients that are taken, not accumulated, are for a reducer's user to average.
    run = _trained if reducer else _steps
    told, expected = run(model), run(single)
    torch.testing.assert_close(told, expected, rtol=1e-8, atol=1e-10)
    assert_same_gradients(model, single)


@pytest.mark.parametrize("axes", AXES, ids=str)
@pytest.mark.parametrize("cls", [Hidden, Behind])
def test_parameters_of_a_loss_have_gradients_not_contributions(cls, axes):
    run_ranks(_learn_a_loss, math.prod(axes.values()), cls, axes, False)


def test_a_loss_with_a_reducer_of_its_own():
    run_ranks(_learn_a_loss, 2, Behind, AXES[0], True)


def _goes_on_alone():
    """What has met cut tensors trains on one rank, which no other would answer; then on all again."""
    layout, losses = make_layout({"w": 2}), []
    torch.manual_seed(1)
    for parallel in (False, True):
        torch.manual_seed(2)
        model = Behind(Loss().double()).double()
        if parallel:
            torchtp.parallelize(model.body, layout)
        told = _trained(model)
        if not parallel or layout.spatial_group.rank() == 0:
            model.loss.zero_grad()
            model.loss(torch.linspace(-1, 1, 2 * 2 * 13 * 17).double().view(2, 2, 13, 17)).backward()
            told += [one.grad.clone() for one in model.loss.parameters()]
        losses.append([*told[:9], *_trained(model), *told[9:]])
    for mine, reference in zip(losses[1], losses[0], strict=False):
        torch.testing.assert_close(mine, reference, rtol=1e-8, atol=1e-10)


def test_a_loss_may_be_trained_by_one_rank_alone():
    run_ranks(_goes_on_alone, 2)
