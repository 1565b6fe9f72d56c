"""roi_align and deform_conv2d of cut images equal the single device, and gather nothing."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from rules import DATA_W, H4, HW, W3, check, device_mesh_of, num_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import torchtp
from torchtp.dtensor.rules.fallback import take_custom_ops
from torchtp.testing import run_ranks

vision = pytest.importorskip("torchvision.ops")

IMAGE = (2, 3, 13, 17)
# Which image, and x and y of two corners: inside a part, over cuts, of no extent, over the edges, beside the image, turned around.
REGIONS = torch.tensor(
    [
        [0, 1, 1, 4, 4], [1, 2.5, 3.25, 14.75, 11.5], [0, 0, 0, 17, 13], [1, 8, 6, 8, 6], [0, -5, -4, 3, 2],
        [1, 14, 10, 25, 21], [0, 30, 30, 40, 40], [1, -40, 2, -30, 9], [0, 9, 7, 4, 3], [1, 5.67, 4.33, 5.68, 12.99],
    ],
    dtype=torch.float64,
)  # fmt: skip

ALIGNED = {
    "plain": {},
    "shifted": {"aligned": True},
    "sampled": {"sampling_ratio": 2},
    "scaled": {"spatial_scale": 0.4, "aligned": True},
    "magnified": {"spatial_scale": 1.7, "sampling_ratio": 3},
}


def run_regions(name, mesh):
    torchtp.dtensor.mark(init_device_mesh("cpu", mesh[0]), range(len(mesh[0])))
    take_custom_ops()
    torch.manual_seed(0)
    kwargs = {"output_size": (3, 2), **ALIGNED[name]}
    image = torch.randn(IMAGE).double()
    check(lambda x: vision.roi_align(x, REGIONS, **kwargs), mesh, [image], double=False, cut_output=False)
    check(lambda x: vision.roi_align(x, REGIONS[:0], **kwargs), mesh, [image], double=False)
    check(lambda x: vision.roi_align(x.exp(), REGIONS, **kwargs).relu(), mesh, [image], double=False)


@pytest.mark.parametrize("mesh", [W3, HW, H4], ids=["w3", "h2_w2", "h4"])
@pytest.mark.parametrize("name", ALIGNED)
def test_regions_match_reference_without_a_gather(name, mesh):
    run_ranks(run_regions, num_ranks(mesh), name, mesh)


def run_plain_gradient(extent):
    """Of regions that were written into a tensor made in forward, as torchvision's detectors do it; of parts without rows."""
    mesh = device_mesh_of((3,))
    torchtp.dtensor.mark(mesh, [0])
    take_custom_ops()
    torch.manual_seed(0)
    image = torch.randn(1, 2, extent, 6).double()
    regions = REGIONS[::2]

    def pooled(x):
        result = torch.zeros(7, 2, 4, 4, dtype=x.dtype)
        result[torch.tensor([5, 0, 1, 3, 2])] = vision.roi_align(x, regions, 4, sampling_ratio=2)
        return result.sin()

    whole = image.clone().requires_grad_()
    cut = distribute_tensor(image, mesh, [Shard(2)], src_data_rank=None).requires_grad_()
    with torchtp.strict():
        pooled(whole).sum().backward()
        pooled(cut).sum().backward()
    assert cut.grad.placements == (Shard(2),)
    torch.testing.assert_close(cut.grad.full_tensor(), whole.grad)
    with torch.inference_mode():
        torch.testing.assert_close(vision.roi_align(cut, regions, 4).full_tensor(), vision.roi_align(image, regions, 4))
    taken = vision.roi_align(cut, regions, 4)
    (grad,) = torch.autograd.grad(taken.sin().sum(), cut, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("extent", [7, 4, 2])
def test_gradients_of_regions_stay_cut(extent):
    run_ranks(run_plain_gradient, 3, extent)


DEFORMED = {  # options, channels out, groups, groups of offsets, whether there is a mask, a bias, how far offsets reach
    "plain": ({"padding": 1}, 4, 1, 1, False, True, 1.0),
    "mask": ({"padding": 1}, 4, 1, 1, True, False, 1.0),
    "groups": ({"padding": (1, 2)}, 6, 2, 2, True, True, 0.5),
    "stride": ({"padding": 1, "stride": 2}, 4, 1, 1, True, True, 2.0),
    "strides": ({"padding": (0, 2), "stride": (3, 1), "dilation": (1, 2)}, 4, 1, 2, True, True, 1.0),
    "far": ({"padding": 1}, 2, 1, 1, True, True, 12.0),
    "outside": ({"padding": 1}, 2, 1, 1, False, True, 60.0),
    "no_padding": ({}, 2, 1, 1, False, False, 0.2),
}


def run_deformed(name, mesh):
    torchtp.dtensor.mark(init_device_mesh("cpu", mesh[0]), range(len(mesh[0])))
    take_custom_ops()
    torch.manual_seed(0)
    options, channels, groups, offset_groups, masked, biased, far = DEFORMED[name]
    image, weight = torch.randn(2, 4, 11, 14).double(), torch.randn(channels, 4 // groups, 3, 3).double()
    extents = F.conv2d(image, weight, groups=groups, **options).shape[2:]
    offset = torch.randn(2, offset_groups * 18, *extents).double() * far
    mask = torch.rand(2, offset_groups * 9, *extents).double()
    bias = torch.randn(channels).double()

    def deformed(x, offset, mask, weight, bias):
        mask, bias = mask if masked else None, bias if biased else None
        return vision.deform_conv2d(x, offset, weight, bias, mask=mask, **options)

    check(deformed, mesh, [image, offset, mask], [weight, bias], double=False, cut_output=True)
    # An image that every rank holds; offsets that every rank holds.
    check(lambda o, m, w, b: deformed(image, o, m, w, b), mesh, [offset, mask], [weight, bias], double=False)
    check(lambda x, w, b: deformed(x, offset, mask, w, b), mesh, [image], [weight, bias], double=False)


@pytest.mark.parametrize("mesh", [W3, HW, DATA_W, H4], ids=["w3", "h2_w2", "data_w", "h4"])
@pytest.mark.parametrize("name", DEFORMED)
def test_deformed_matches_reference_without_a_gather(name, mesh):
    run_ranks(run_deformed, num_ranks(mesh), name, mesh)


class Deformable(nn.Module):
    """With what says where to sample, as networks have it."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, stride=2, padding=1)
        self.places = nn.Conv2d(4, 27, 3, padding=1)
        self.deformed = vision.DeformConv2d(4, 5, 3, padding=1)

    def forward(self, x):
        x = self.stem(x).relu()
        places = self.places(x)
        return self.deformed(x, places[:, :18], places[:, 18:].sigmoid())


def run_module(sizes, rows):
    axes = {name: -2 + number for number, name in enumerate(sizes)}
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    torch.manual_seed(0)
    one, image = Deformable().double(), torch.randn(2, 3, rows, 12).double()
    torch.manual_seed(0)
    cut = torchtp.parallelize(Deformable().double(), torchtp.Layout(mesh, axes), output="full")
    with torchtp.strict():
        output = cut(image)
        output.square().mean().backward()
    expected = one(image)
    expected.square().mean().backward()
    torch.testing.assert_close(output, expected)
    for mine, reference in zip(cut.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, reference.grad)
    offset = torch.zeros(2, 18, 9, 9).double()
    wrong = torchtp.Layout(mesh, axes).shard(torch.randn(2, 4, rows, 12).double())
    with pytest.raises(RuntimeError, match="offset"):
        vision.deform_conv2d(wrong, offset, torch.randn(5, 4, 3, 3).double(), padding=1)


@pytest.mark.parametrize(("sizes", "rows"), [({"h": 3}, 14), ({"h": 3}, 5), ({"h": 2, "w": 2}, 9)], ids=str)
def test_a_deformable_module(sizes, rows):
    run_ranks(run_module, math.prod(sizes.values()), sizes, rows)


def detector(seen):
    from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn

    torch.manual_seed(0)
    made = fasterrcnn_mobilenet_v3_large_320_fpn(
        weights=None, weights_backbone=None, num_classes=3, min_size=96, max_size=160, rpn_pre_nms_top_n_train=60
    )
    made.backbone.register_forward_pre_hook(lambda _, images: seen.append(images[0]))
    return made.double().train()


def losses_of(module, images):
    boxes = torch.tensor([[10.0, 12, 60, 70], [30, 20, 110, 85]], dtype=torch.float64)
    targets = [{"boxes": boxes + i, "labels": torch.tensor([1, 2])} for i in range(2)]
    losses = module(images, targets)
    sum(losses.values()).backward()
    return losses


def run_detector(sizes):
    """Images of two sizes, which are resized and padded to a multiple of 32 inside of the network."""
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    generator = torch.Generator().manual_seed(3)
    images = [torch.rand(3, *size, generator=generator, dtype=torch.float64) for size in ((90, 130), (100, 121))]
    batches = []
    one = detector(batches)
    expected = losses_of(one, images)
    layout = torchtp.Layout(mesh, {name: {"h": -2, "w": -1}[name] for name in sizes})
    cut = torchtp.parallelize(detector(batches), layout, output="full")
    got = losses_of(cut, images)
    assert {place.is_shard() for place in batches[1].placements} == {True}, batches[1].placements
    for name, loss in expected.items():
        torch.testing.assert_close(got[name], loss)
    scale = max(parameter.grad.abs().max() for parameter in one.parameters() if parameter.grad is not None)
    for (name, mine), reference in zip(cut.named_parameters(), one.parameters(), strict=True):
        if reference.grad is not None:
            assert (mine.grad - reference.grad).abs().max() < 1e-9 * scale, name


@pytest.mark.filterwarnings("ignore::torchtp.GatherWarning")
@pytest.mark.parametrize("sizes", [{"w": 2}, {"h": 2, "w": 2}], ids=str)
def test_a_detector_works_on_cut_images(sizes):
    run_ranks(run_detector, math.prod(sizes.values()), sizes)
