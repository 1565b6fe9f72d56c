"""Published networks, unedited, on cut images of uneven size: loss, all gradients and buffers as on one device."""

from __future__ import annotations

import copy
import importlib
import warnings

import pytest
import torch
import torch.nn.functional as F
from models import make_layout
from test_models import whole
from torch import nn

import torchtp
from torchtp.testing import run_ranks

CASES = {  # of torchvision or timm, the image's height and width
    "torchvision.mobilenet_v3_small": (70, 75),
    "torchvision.shufflenet_v2_x0_5": (70, 75),
    "torchvision.mnasnet0_5": (70, 75),
    "torchvision.squeezenet1_1": (70, 75),
    "torchvision.densenet121": (70, 75),
    "torchvision.regnet_y_400mf": (70, 75),
    "torchvision.swin_t": (70, 75),
    "timm.convnextv2_atto": (70, 75),
    "timm.edgenext_xx_small": (70, 75),
    "timm.pvt_v2_b0": (64, 96),
    "timm.hrnet_w18_small": (64, 96),  # its branches want multiples of 32: 3 columns in the last
}


def make(name):
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    library, _, name = name.partition(".")
    if library == "timm":
        model = importlib.import_module("timm").create_model(name, num_classes=5)
    else:
        model = getattr(importlib.import_module("torchvision.models"), name)(weights=None, num_classes=5)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.double()


def loss_and_gradients(model, x, labels):
    model.zero_grad()
    torch.manual_seed(5)  # of stochastic depth
    loss = F.cross_entropy(model(x), labels)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return whole(loss.detach()), {"input": whole(x.grad)} | gradients | dict(model.named_buffers())


def compare(name, axes, training):
    height, width = CASES[name]
    layout = make_layout(axes)
    single = make(name).train(training)
    mine = torchtp.parallelize(copy.deepcopy(single), layout)
    x = torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(2)).double()
    labels = torch.tensor([1, 3])
    expected, wanted = loss_and_gradients(single, x.clone().requires_grad_(), labels)
    cut = layout.shard(x).detach().requires_grad_()
    with torchtp.strict():
        loss, got = loss_and_gradients(mine, cut, labels)
    assert abs(loss - expected) <= 1e-9 * abs(expected)
    largest = max(gradient.abs().max().item() for gradient in wanted.values() if gradient is not None)
    errors = {}
    for key, want in wanted.items():
        if want is None or not want.is_floating_point():
            assert want is None or torch.equal(got[key], want), key
            continue
        # a bias before a batch norm has no gradient but rounding: judged by the largest there is
        scale = max(want.abs().max().item(), 1e-6 * largest)
        errors[key] = ((got[key] - want).abs().max() / scale).item()
    return {key: error for key, error in errors.items() if not error <= 1e-9}


EVALUATED = ("torchvision.mobilenet_v3_small", "torchvision.densenet121", "timm.convnextv2_atto")


@pytest.mark.parametrize(
    "name, training",
    [(name, True) for name in CASES] + [(name, False) for name in EVALUATED],
    ids=[f"{name}-train" for name in CASES] + [f"{name}-eval" for name in EVALUATED],
)
def test_published_network_equals_the_single_device(name, training):
    pytest.importorskip(name.partition(".")[0])
    for rank, errors in enumerate(run_ranks(compare, 2, name, {"w": 2}, training, timeout=120.0)):
        assert not errors, f"rank {rank}: {errors}"
