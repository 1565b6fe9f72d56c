"""`tensor.data = values` of cut activations, as networks of binary weights and activations do."""

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


def _of_itself(module, x):
    x.data = x.data.sign()
    return x


def _of_zeros(module, x):
    y = x.sin()
    x.data = torch.zeros_like(x)
    return x + y


def _of_what_all_hold(module, x):
    x.data = torch.linspace(0, 1, x.numel(), dtype=x.dtype).view(x.shape)
    return x


def _of_a_parameter(module, x):
    x.data = module.gain.data.expand(x.shape)
    return x * module.gain


def _of_other_size(module, x):
    x = x.clone()
    x.data = F.avg_pool2d(x.data, 2)
    return x.square()


def _of_a_copy_and_a_mean(module, x):
    y, mean = x.clone(), x.mean((2, 3), keepdim=True)
    y.data = y.data.clamp(-0.1, 0.1)
    mean.data = mean.data.round(decimals=1)
    return y * mean + x


PROGRAMS = [_of_itself, _of_zeros, _of_what_all_hold, _of_a_parameter, _of_a_copy_and_a_mean]


class Net(nn.Module):
    def __init__(self, program):
        super().__init__()
        self.program = program
        self.first, self.last = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 2, 3, padding=1)
        self.gain = nn.Parameter(torch.tensor([0.3, -0.4, 0.5]).view(3, 1, 1))

    def forward(self, x):
        return self.last(self.program(self, self.first(x)))


def _train(program, axes):
    torch.manual_seed(1)
    single = Net(program).double()
    model = torchtp.parallelize(copy.deepcopy(single), make_layout(axes), output="full")
    outputs = []
    for each in (single, model):
        outputs.append(each(make_images(0, 2)))
        (loss_of(outputs[-1]) + each.gain.square().sum()).backward()
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-10, atol=1e-10)
    assert_same_gradients(model, single)


@pytest.mark.parametrize("axes", [{"w": 2}, {"h": 2, "w": 2}], ids=str)
@pytest.mark.parametrize("program", PROGRAMS)
def test_new_data_of_cut_activations(program, axes):
    run_ranks(_train, math.prod(axes.values()), program, axes)


def _evaluate(axes):
    torch.manual_seed(1)
    single = Net(_of_other_size).double()
    model = torchtp.parallelize(copy.deepcopy(single), make_layout(axes), output="full")
    with torch.no_grad():
        torch.testing.assert_close(model(make_images(0, 2)), single(make_images(0, 2)), rtol=1e-10, atol=1e-10)


def test_new_data_of_another_size():
    run_ranks(_evaluate, 2, {"w": 2})
