"""Unedited networks on cut images: loss, gradients and what is communicated, against the single device."""

from __future__ import annotations

import contextlib
import copy
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from models import make_layout
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard

import torchtp
from torchtp.testing import run_ranks


class Stage(nn.Module):
    def __init__(self, c_in, c_out, norm):
        super().__init__()
        self.first = nn.Conv2d(c_in, c_out, 3, padding=1)
        self.second = nn.Conv2d(c_out, c_out, 3, padding=1)
        self.norms = nn.ModuleList([norm(c_out), norm(c_out)])

    def forward(self, x):
        x = F.relu(self.norms[0](self.first(x)), inplace=True)
        return F.leaky_relu(self.norms[1](self.second(x)), 0.1)


class UNet(nn.Module):
    """Three levels, batch norm down and group norm up, crops where extents are odd, a pooled gate in the middle."""

    def __init__(self):
        super().__init__()
        batch, group = nn.BatchNorm2d, lambda channels: nn.GroupNorm(4, channels)
        self.down = nn.ModuleList([Stage(3, 8, batch), Stage(8, 16, batch), Stage(16, 32, group)])
        self.gate = nn.Conv2d(32, 32, 1)
        self.up = nn.ModuleList([nn.ConvTranspose2d(32, 16, 2, stride=2), nn.ConvTranspose2d(16, 8, 2, stride=2)])
        self.merge = nn.ModuleList([Stage(32, 16, group), Stage(16, 8, group)])
        self.head = nn.Conv2d(8, 5, 1)

    def forward(self, x):
        skips = []
        for i, stage in enumerate(self.down):
            x = stage(x if i == 0 else F.max_pool2d(x, 2, ceil_mode=True))
            skips.append(x)
        x = x * torch.sigmoid(self.gate(F.adaptive_avg_pool2d(x, 1)))
        for skip, up, merge in zip(skips[1::-1], self.up, self.merge, strict=True):
            x = up(x)[:, :, : skip.shape[2], : skip.shape[3]]
            x = merge(torch.cat([skip, x], 1))
        return F.interpolate(self.head(x), scale_factor=2, mode="bilinear", align_corners=False)


def make(name):
    torch.manual_seed(0)
    if name == "unet":
        return UNet().double()
    from torchvision import models

    warnings.simplefilter("ignore")
    if name == "resnet50":
        model = models.resnet50(num_classes=5)
    elif name == "convnext_tiny":
        model = models.convnext_tiny(num_classes=5, stochastic_depth_prob=0.0)
        for module in model.modules():
            if hasattr(module, "layer_scale"):
                nn.init.constant_(module.layer_scale, 0.5)  # of 1e-6, nothing would be seen of a block
    else:
        model = models.segmentation.deeplabv3_resnet50(weights=None, weights_backbone=None, num_classes=5)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    return model.double()


def output_of(model, x):
    output = model(x)
    return output["out"] if isinstance(output, dict) else output


def loss_of(output):
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 5, (output.shape[0], *output.shape[2:]), generator=generator)
    return F.cross_entropy(output, labels)


@contextlib.contextmanager
def counting_gathers(shapes):
    """Enters the shape of every tensor that DTensor, upstream or ours, gathers."""
    gather = Shard._to_replicate_tensor

    def counted(self, local, *args, **kwargs):
        shapes.append(tuple(local.shape))
        return gather(self, local, *args, **kwargs)

    Shard._to_replicate_tensor = counted
    try:
        yield
    finally:
        Shard._to_replicate_tensor = gather


def train_once(name, axes, shape):
    layout = make_layout(axes)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2)).double()
    single = make(name)
    mine = torchtp.parallelize(copy.deepcopy(single), layout)
    reference = x.clone().requires_grad_()
    expected = loss_of(output_of(single, reference))
    expected.backward()
    cut = layout.shard(x).detach().requires_grad_()
    gathered = []
    with torchtp.strict(), counting_gathers(gathered):
        loss = loss_of(output_of(mine, cut))
        loss.backward()
    images = [each for each in gathered if math.prod(each[2:]) > 1]  # what is one pixel has been pooled
    assert not images, f"gathered {images}"
    errors = {"loss": abs(loss.item() - expected.item()) / abs(expected.item())}
    gradients = {"input": (whole(cut.grad), reference.grad)}
    for (key, parameter), theirs in zip(mine.named_parameters(), single.parameters(), strict=True):
        gradients[key] = (whole(parameter.grad), theirs.grad)
    largest = max(theirs.abs().max().item() for _, theirs in gradients.values())
    for key, (got, want) in gradients.items():
        # a bias before a batch norm has no gradient but rounding: judged by the largest there is
        scale = max(want.abs().max().item(), 1e-6 * largest)
        errors[key] = ((got - want).abs().max() / scale).item()
    for (key, buffer), theirs in zip(mine.named_buffers(), single.buffers(), strict=True):
        errors[key] = (buffer - theirs).abs().max().item()
    return {key: error for key, error in errors.items() if not error <= 1e-9}


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


CASES = {
    "w": ({"w": 2}, (2, 3, 97, 75)),
    "h": ({"h": 2}, (2, 3, 97, 75)),
    "h_and_w": ({"h": 2, "w": 2}, (2, 3, 75, 97)),
    "empty_shards": ({"w": 4}, (2, 3, 65, 70)),  # 70 columns are 3 in ResNet's last stage, 2 in ConvNeXt's
}


@pytest.mark.parametrize(
    "name, case",
    [("unet", case) for case in CASES] + [("resnet50", "h_and_w"), ("convnext_tiny", "w"), ("deeplabv3_resnet50", "w")],
)
def test_network_equals_the_single_device_without_a_gather(name, case):
    if name != "unet":
        pytest.importorskip("torchvision")
    axes, shape = CASES[case]
    ranks = 1
    for size in axes.values():
        ranks *= size
    for rank, errors in enumerate(run_ranks(train_once, ranks, name, axes, shape, timeout=240.0)):
        assert not errors, f"rank {rank}: {errors}"
