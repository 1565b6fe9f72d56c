"""F.grid_sample of cut images equals the single device, and pulls no more rows than the grid points at."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from rules import DATA_W, HW, W3, check, num_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import torchtp
from torchtp.dtensor.rules.grid_sample import pulled_window
from torchtp.testing import run_ranks

_BILINEAR = 0
IMAGE = (2, 4, 9, 11)


def base(height=9, width=11, reach=1.0):
    """Of the whole image, each point where it is."""
    rows, columns = (torch.linspace(-reach, reach, extent, dtype=torch.float64) for extent in (height, width))
    return torch.stack(torch.meshgrid(columns, rows, indexing="xy"), -1)[None]


def warped(x, flow, **kwargs):
    """As networks of optical flow and stereo do it; the flow has an image's form."""
    kwargs = {"align_corners": True} | kwargs
    return F.grid_sample(x, base() + flow[:, :2].permute(0, 2, 3, 1) * 0.3, **kwargs)


def warped_volume(x, flow, reach=(1, 1, 1), **kwargs):
    """As networks that register volumes do it."""
    kwargs = {"align_corners": True} | kwargs
    places = [torch.linspace(-r, r, n, dtype=torch.float64) for r, n in zip(reach, x.shape[2:], strict=True)]
    grid = torch.stack(torch.meshgrid(*places, indexing="ij")[::-1], -1)
    return F.grid_sample(x, grid + flow.permute(0, 2, 3, 4, 1) * 0.3, **kwargs)


def points(num):
    """A list of places, all over the image."""
    return torch.rand(2, num, 1, 2, generator=torch.Generator().manual_seed(num)).double() * 2 - 1


FLOW = (2, 2, 9, 11)
VOLUME = (1, 2, 5, 9, 11)
CASES = {
    "near": (lambda x, f: warped(x, f * 0.2), [IMAGE, FLOW]),
    "far": (lambda x, f: warped(x, f * 4), [IMAGE, FLOW]),
    "outside": (lambda x, f: warped(x, f + 9), [IMAGE, FLOW]),
    "edges": (lambda x, f: warped(x, f, align_corners=False), [IMAGE, FLOW]),
    "border": (lambda x, f: warped(x, f * 5, padding_mode="border", align_corners=False), [IMAGE, FLOW]),
    "border_outside": (lambda x, f: warped(x, f - 30, padding_mode="border"), [IMAGE, FLOW]),
    "bicubic": (lambda x, f: warped(x, f, mode="bicubic"), [IMAGE, FLOW]),
    "bicubic_border": (lambda x, f: warped(x, f * 3, mode="bicubic", padding_mode="border"), [IMAGE, FLOW]),
    "reflection": (lambda x, f: warped(x, f * 2, padding_mode="reflection"), [IMAGE, FLOW]),
    "reflection_edges": (lambda x, f: warped(x, f * 5, padding_mode="reflection", align_corners=False), [IMAGE, FLOW]),
    "reflection_outside": (lambda x, f: warped(x, f - 30, padding_mode="reflection"), [IMAGE, FLOW]),
    "reflection_one_row": (lambda x, f: warped(x[:, :, 4:5], f, padding_mode="reflection"), [IMAGE, FLOW]),
    "constant_grid": (
        lambda x: F.grid_sample(x, base(reach=0.7).expand(2, -1, -1, -1), align_corners=False),
        [IMAGE],
    ),
    "zoom": (lambda x: F.grid_sample(x, base(20, 31, 0.4).expand(2, -1, -1, -1), align_corners=True), [IMAGE]),
    "few_samples": (lambda x: F.grid_sample(x, base(1, 1).expand(2, -1, -1, -1), align_corners=False), [IMAGE]),
    "points": (lambda x: F.grid_sample(x, points(13), align_corners=False).squeeze(3).sin(), [IMAGE]),
    "moved_points": (
        lambda x, f: F.grid_sample(x, points(16) + f.tanh().mean((2, 3))[:, None, None], align_corners=True)[..., 0],
        [IMAGE, FLOW],
    ),
    "points_in_a_volume": (
        lambda x: F.grid_sample(x, torch.cat([points(14), points(14)[..., :1]], 3)[:1, :, None], align_corners=False).flatten(2),
        [VOLUME],
    ),
    "constant_image": (lambda f: warped(torch.linspace(-1, 1, 792).double().view(IMAGE).sin(), f), [FLOW]),
    "one_row": (lambda x, f: warped(x[:, :, 4:5], f), [IMAGE, FLOW]),
    "flipped": (lambda x: F.grid_sample(x, -base().expand(2, -1, -1, -1), align_corners=True), [IMAGE]),
    "nearest": (lambda x, f: warped(x, f, mode="nearest"), [IMAGE, FLOW]),
    "nearest_between": (  # half of all samples lie between two pixels
        lambda x: F.grid_sample(x, base(17, 21).expand(2, -1, -1, -1), mode="nearest", align_corners=True),
        [IMAGE],
    ),
    "nearest_border": (
        lambda x, f: warped(x, f * 4, mode="nearest", padding_mode="border", align_corners=False),
        [IMAGE, FLOW],
    ),
    "nearest_reflection": (
        lambda x, f: warped(x, f * 4, mode="nearest", padding_mode="reflection", align_corners=False),
        [IMAGE, FLOW],
    ),
    "volume": (lambda x, f: warped_volume(x, f), [VOLUME, (1, 3, 5, 9, 11)]),
    "volume_far": (lambda x, f: warped_volume(x, f * 3, align_corners=False), [VOLUME, (1, 3, 5, 9, 11)]),
    "volume_border": (lambda x, f: warped_volume(x, f * 3, padding_mode="border"), [VOLUME, (1, 3, 5, 9, 11)]),
    "volume_reflection": (
        lambda x, f: warped_volume(x, f * 5, padding_mode="reflection", align_corners=False),
        [VOLUME, (1, 3, 5, 9, 11)],
    ),
    "volume_still": (lambda x, f: warped_volume(x, f * 0), [VOLUME, (1, 3, 5, 9, 11)]),
    "volume_still_edges": (
        lambda x, f: warped_volume(x, f * 0, align_corners=False, reach=(4 / 5, 8 / 9, 10 / 11)),
        [VOLUME, (1, 3, 5, 9, 11)],
    ),
    "volume_nearest": (lambda x, f: warped_volume(x, f, mode="nearest"), [VOLUME, (1, 3, 5, 9, 11)]),
    "affine": (
        lambda x: F.grid_sample(
            x, F.affine_grid(torch.eye(2, 3)[None].expand(2, -1, -1).double() * 0.9, list(x.shape), align_corners=False),
            align_corners=False,
        ),
        [IMAGE],
    ),
}  # fmt: skip


def run_still(padding, align_corners, size, rows, dtype):
    """A flow of nothing: all samples lie at pixels, where the derivative by the flow is one of two."""
    mesh = init_device_mesh("cpu", (size,))
    torchtp.dtensor.mark(mesh, [0])
    torch.manual_seed(0)
    image, flow = torch.randn(1, 3, rows, 11).to(dtype), torch.zeros(1, 2, rows, 11).to(dtype)
    reach = torch.tensor([1.0, 1.0]) if align_corners else torch.tensor([10 / 11, (rows - 1) / rows])

    def loss(x, f):
        grid = (base(rows, 11) * reach.double()).to(dtype) + f.permute(0, 2, 3, 1)
        return F.grid_sample(x, grid, padding_mode=padding, align_corners=align_corners).sin().sum()

    whole = [t.clone().requires_grad_() for t in (image, flow)]
    cut = [distribute_tensor(t, mesh, [Shard(2)], src_data_rank=None).requires_grad_() for t in (image, flow)]
    with torchtp.strict():
        loss(*whole).backward()
        loss(*cut).backward()
    for mine, reference in zip(cut, whole, strict=True):
        error = (mine.grad.full_tensor() - reference.grad).abs().max() / reference.grad.abs().max()
        assert error < 5e3 * torch.finfo(dtype).eps, f"off by {error:.1e}"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [9, 16, 37])
@pytest.mark.parametrize("align_corners", [True, False], ids=["corners", "edges"])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
def test_a_flow_of_nothing_has_the_derivative_of_one_device(padding, align_corners, rows, dtype):
    for size in (2, 3):
        run_ranks(run_still, size, padding, align_corners, size, rows, dtype)


def run_cudnn():
    """What F.grid_sample calls on a CUDA device; the local op is the same on all."""
    mesh = init_device_mesh("cpu", (2,))
    torchtp.dtensor.mark(mesh, [0])
    torch.manual_seed(0)
    image, grid = torch.randn(IMAGE).double(), base().repeat(2, 1, 1, 1) * 0.9
    whole = [t.clone().requires_grad_() for t in (image, grid)]
    cut = [
        distribute_tensor(t, mesh, [Shard(dim)], src_data_rank=None).requires_grad_()
        for t, dim in ((image, 3), (grid, 2))
    ]
    expected = F.grid_sample(*whole, align_corners=True)
    with torchtp.strict():
        got = torch.cudnn_grid_sampler(*cut)
        got.sin().sum().backward()
    expected.sin().sum().backward()
    for mine, reference in ((got, expected), *((a.grad, b.grad) for a, b in zip(cut, whole, strict=True))):
        torch.testing.assert_close(mine.full_tensor(), reference)


def test_the_op_of_cudnn():
    run_ranks(run_cudnn, 2)


def run_case(name, mesh):
    torchtp.dtensor.mark(init_device_mesh("cpu", mesh[0]), range(len(mesh[0])))
    torch.manual_seed(0)
    fn, shapes = CASES[name]
    check(fn, mesh, [torch.randn(shape).double() for shape in shapes], double=False, cut_output=True)


@pytest.mark.parametrize("mesh", [W3, HW, DATA_W], ids=["w3", "h2_w2", "data_w"])
@pytest.mark.parametrize("name", CASES)
def test_grid_sample_matches_reference_without_a_gather(name, mesh):
    run_ranks(run_case, num_ranks(mesh), name, mesh)


def run_numbers(dtype):
    mesh = init_device_mesh("cpu", (2,))
    torchtp.dtensor.mark(mesh, [0])
    torch.manual_seed(0)
    image, flow, cotangent = (torch.randn(IMAGE).to(dtype) for _ in range(3))
    grid = (base() + flow[:, :2].permute(0, 2, 3, 1) * 0.1).to(dtype)
    whole = [t.double().requires_grad_() for t in (image, grid)]
    cut = [
        distribute_tensor(t, mesh, [Shard(dim)], src_data_rank=None).requires_grad_()
        for t, dim in ((image, 3), (grid, 2))
    ]
    with torchtp.strict():
        expected = F.grid_sample(*whole, align_corners=False)
        got = F.grid_sample(*cut, align_corners=False)
        expected.backward(cotangent.double())
        got.backward(distribute_tensor(cotangent, mesh, [Shard(3)], src_data_rank=None))
    for mine, reference in ((got, expected), *((a.grad, b.grad) for a, b in zip(cut, whole, strict=True))):
        assert mine.dtype == dtype
        error = (mine.full_tensor().double() - reference).abs().max() / reference.abs().max()
        assert error < 10 * torch.finfo(dtype).eps, f"off by {error:.1e}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_other_number_formats(dtype):
    run_ranks(run_numbers, 2, dtype)


def run_window():
    mesh = init_device_mesh("cpu", (4,))
    torchtp.dtensor.mark(mesh, [0])
    image = distribute_tensor(torch.randn(1, 1, 5, 400).double(), mesh, [Shard(3)], src_data_rank=None)
    with pytest.raises(RuntimeError, match="expected scalar type"):
        F.grid_sample(image, base(5, 400).float(), align_corners=True)
    return [
        pulled_window(image, base(5, 400) + shift * 2 / 399, _BILINEAR, True).image.size(3)
        for shift in (0, 3.5, torch.linspace(-200, 200, 400).double().view(1, 1, 400, 1))
    ]


def test_a_rank_pulls_what_its_grid_points_at():
    for still, shifted, stretched in run_ranks(run_window, 4):
        assert 100 <= still <= 104  # own columns, and those that rounding may reach
        assert 90 <= shifted <= 104
        assert 1 <= stretched <= 204  # of those outside of the image a rank needs none


class Warp(torch.nn.Module):
    def forward(self, image):
        flow = F.avg_pool2d(image, 3, 1, 1)
        return F.grid_sample(image, flow.permute(0, 2, 3, 1)[..., :2], align_corners=False)


def test_without_data_the_whole_may_be_pulled():
    told = torchtp.explain(Warp(), (1, 3, 8, 12), {"w": 2})
    assert not told.gathers
    assert told.exchanged_bytes >= 3 * 8 * 6 * 4  # the other half, at least once
