"""parallelize of modules that torch.fx made, whose code changes while they live."""

import copy

import torch
from models import make_layout
from torch import nn
from torch.distributed.tensor import DTensor
from training import assert_same_gradients, loss_of, make_images

import torchtp
from torchtp.testing import run_ranks


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.gamma = nn.Parameter(torch.linspace(0.3, 0.7, 4).view(4, 1, 1))

    def forward(self, x):
        return self.norm(self.conv(x)).relu() * self.gamma


class OfTwoGraphs(torch.fx.GraphModule):
    """As torchvision's feature extractors: one for training, one for evaluation."""

    def train(self, mode=True):
        self.graph = torch.fx.Tracer().trace(Scaled())
        return super().train(mode)


def _switches(is_root):
    layout = make_layout({"w": 2})
    torch.manual_seed(0)
    scaled = Scaled()
    traced = OfTwoGraphs(scaled, torch.fx.Tracer().trace(scaled)).double()
    single = traced if is_root else nn.Sequential(traced)
    model = torchtp.parallelize(copy.deepcopy(single), layout)
    for step in range(2):
        image = make_images(step, 2)
        for each in (single, model):
            each.eval()
            with torch.no_grad():
                each(image)
            each.train()
        copied = copy.deepcopy(model)
        loss_of(single(image)).backward()
        for each in (model, copied):
            output = each(image)
            assert isinstance(output, DTensor)
            loss_of(output).backward()
            assert_same_gradients(each, single)
            each.zero_grad()
        single.zero_grad()


def test_the_code_of_a_graph_module_may_be_compiled_anew():
    for is_root in (True, False):
        run_ranks(_switches, 2, is_root)
