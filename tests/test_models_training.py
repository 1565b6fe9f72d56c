"""Networks of torchvision and timm as they train, with DropPath, dropout and running statistics: gradients and buffers."""

import copy
import importlib.util
import warnings

import pytest
import torch
from models import make_layout
from torch.distributed.tensor import DTensor

import torchtp
from torchtp.testing import run_ranks

MAX_DIFFERENCE = 1e-9
BATCH = 2


def _make(name):
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


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["torchvision.convnext_tiny", "torchvision.deeplabv3_resnet50"])
def test_masks_do_not_depend_on_the_cut(name):
    _check(name, {"h": 2, "w": 2}, 75, 65)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["convnext_atto", "resnet18d", "efficientnet_b0", "regnetx_002"])
def test_timm_trains_as_on_one_device(name):
    _check(f"timm.{name}", {"w": 2}, 65, 97, strict=False)
