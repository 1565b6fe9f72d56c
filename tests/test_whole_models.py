"""Unedited networks from torchvision and timm, cut over ranks, give the single device's loss and all its gradients."""

import copy
import importlib.util
import warnings

import pytest
import torch
from models import make_layout
from torch import nn
from torch.distributed.tensor import DTensor

import torchtp
from torchtp.testing import run_ranks

MAX_DIFFERENCE = 1e-9
BATCH = 2


class UNet(nn.Module):
    """Two levels; batch norm going down, group norm going up, transposed convolutions, skips of uneven sizes."""

    def __init__(self):
        super().__init__()
        self.enter = self._down(3, 8, 1)
        self.down = nn.ModuleList([self._down(8, 16, 2), self._down(16, 24, 2)])
        self.up = nn.ModuleList([nn.ConvTranspose2d(24, 16, 3, 2, 1), nn.ConvTranspose2d(16, 8, 3, 2, 1)])
        self.mix = nn.ModuleList([self._mix(32, 16), self._mix(16, 8)])
        self.leave = nn.Conv2d(8, 2, 1)

    @staticmethod
    def _down(inputs, outputs, stride):
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
        )

    @staticmethod
    def _mix(inputs, outputs):
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU())

    def forward(self, x):
        skips = [self.enter(x)]
        for down in self.down:
            skips.append(down(skips[-1]))
        x = skips.pop()
        for up, mix in zip(self.up, self.mix, strict=True):
            skip = skips.pop()
            x = mix(torch.cat([up(x, output_size=skip.shape[-2:]), skip], 1))
        return self.leave(x)


def _make(name):
    if name == "unet":
        return UNet()
    library, _, name = name.partition(".")
    if library == "timm":
        import timm

        return timm.create_model(name, num_classes=7)
    import torchvision

    if name == "deeplabv3_resnet50":
        return torchvision.models.segmentation.deeplabv3_resnet50(weights=None, weights_backbone=None, num_classes=5)
    return torchvision.models.get_model(name, weights=None, num_classes=7)


def _run(model, image):
    """The loss of one training step on the image, and what its output is."""
    torch.manual_seed(5)  # of the masks
    output = model(image)
    output = output["out"] if isinstance(output, dict) else output
    output = output.full_tensor() if isinstance(output, DTensor) else output
    # Every element weighs differently: a gradient that goes to the wrong place shows.
    weight = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output).roll(3, -1)
    loss = (output * weight).sum() / BATCH + output.square().mean()
    loss.backward()
    return loss.detach()


def _assert_close(found, expected, scale, name):
    difference = (found - expected).abs().max().item() / max(expected.abs().max().item(), scale)
    assert difference <= MAX_DIFFERENCE, f"{name}: differs by {difference:.1e} of the largest"


def _compare(name, axes, height, width, strict):
    warnings.simplefilter("ignore", torchtp.GatherWarning)
    torch.manual_seed(1)
    single = _make(name).double().train()
    model = copy.deepcopy(single)
    image = torch.randn(BATCH, 3, height, width, dtype=torch.float64)

    x = image.clone().requires_grad_()
    expected = _run(single, x)

    layout = make_layout(axes)
    torchtp.parallelize(model, layout)
    cut = layout.shard(image).requires_grad_()
    if strict:
        with torchtp.strict():
            loss = _run(model, cut)
    else:
        loss = _run(model, cut)

    _assert_close(loss, expected, 1e-3, "loss")
    _assert_close(cut.grad.full_tensor(), x.grad, 0, "input gradient")
    gradients = dict(single.named_parameters())
    # A bias before batch norm has a true gradient of zero: what is left there is measured by the others' size.
    scale = 1e-3 * max(parameter.grad.abs().max().item() for parameter in gradients.values())
    for key, parameter in model.named_parameters():
        _assert_close(parameter.grad, gradients[key].grad, scale, key)
    buffers = dict(single.named_buffers())
    for key, buffer in model.named_buffers():
        _assert_close(buffer.double(), buffers[key].double(), 1e-3, key)


def _check(name, axes, height, width, strict=True):
    library = name.partition(".")[0]
    if library in ("torchvision", "timm") and importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    run_ranks(_compare, torch.Size(axes.values()).numel(), name, axes, height, width, strict, timeout=300.0)


CUTS = [{"w": 2}, {"h": 2}, {"w": 4}, {"h": 2, "w": 2}]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("axes", [*CUTS, {"h": 4}, {"w": 3}], ids=str)
def test_unet_is_exact(axes):
    _check("unet", axes, 37, 29)


# 65 columns end as 3 in the last stage: with 4 ranks the last one is empty there.
@pytest.mark.timeout(900)
@pytest.mark.parametrize("axes", CUTS, ids=str)
@pytest.mark.parametrize("name", ["resnet50", "convnext_tiny", "deeplabv3_resnet50"])
def test_torchvision_is_exact(name, axes):
    _check(f"torchvision.{name}", axes, 97, 65)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["convnext_atto", "resnet18d", "efficientnet_b0", "regnetx_002"])
def test_timm_is_exact(name):
    _check(f"timm.{name}", {"w": 2}, 65, 97, strict=False)
