"""F.unfold, F.fold, windows and max unpooling of cut DTensors equal the single device, without a gather."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from rules import DATA_W, H4, HW, W3, check, device_mesh_of, num_ranks
from torch.distributed.tensor import Shard, distribute_tensor

import torchtp
from torchtp.testing import run_ranks

IMAGE = (2, 4, 9, 11)


def unpooled(x):
    values, indices = F.max_pool2d(x, 2, return_indices=True)
    return F.max_unpool2d(values.sin(), indices, 2, output_size=(9, 11))


def upsampled(x):
    """RAFT's: each fine pixel a weighted mean of nine coarse neighbours."""
    weights = x[:, :, None].softmax(1)
    patches = F.unfold(x[:, :2], 3, padding=1).view(2, 2, 9, 1, 9, 11)
    return (patches * weights.movedim(2, 1).unsqueeze(2)[:, :, :, :4].sum(3, keepdim=True)).sum(2)


def attended(x):
    """HaloNet's: the pixels of each window as a sequence."""
    rows = x.unfold(2, 9, 1).unfold(3, 11, 1).reshape(2, 4, 1, -1).permute(0, 2, 3, 1)
    return (rows.square() @ rows.transpose(-1, -2)).softmax(-1) @ rows


CASES = {
    "same": (lambda x: F.unfold(x, 3, padding=1).sin(), IMAGE),
    "valid": (lambda x: F.unfold(x, (2, 3)).sin(), IMAGE),
    "strided": (lambda x: F.unfold(x, 3, stride=2, padding=(2, 1)).sin(), IMAGE),
    "dilated": (lambda x: F.unfold(x, 3, dilation=(2, 3), padding=4).sin(), IMAGE),
    "patches": (lambda x: F.unfold(x, 3, stride=3).sin(), IMAGE),
    "one_patch": (lambda x: F.unfold(x, (9, 11)).sin(), IMAGE),
    "sparse": (lambda x: F.unfold(x, 1, stride=4).sin(), IMAGE),
    "and_back": (lambda x: F.fold(F.unfold(x, 3, padding=1, stride=2).sin(), (9, 11), 3, padding=1, stride=2), IMAGE),
    "overlap_added": (lambda x: F.fold(F.unfold(x, 4, padding=3).sin(), (9, 11), 4, padding=3), IMAGE),
    "windows": (lambda x: x.unfold(3, 4, 3).sin(), IMAGE),
    "windows_of_both": (lambda x: x.unfold(2, 3, 2).unfold(-2, 5, 1).square().sum(-1), IMAGE),
    "window": (lambda x: x.unfold(3, 11, 1).unfold(2, 9, 1).sin(), IMAGE),
    "attended": (attended, IMAGE),
    "upsampled": (upsampled, IMAGE),
    "unpooled": (unpooled, IMAGE),
}


def run_case(name, mesh):
    torchtp.dtensor.mark(device_mesh_of(mesh[0]), [axis for axis, dim in enumerate(mesh[1]) if dim])
    torch.manual_seed(0)
    fn, shape = CASES[name]
    # The second derivative of attention brings scores together.
    check(fn, mesh, [torch.randn(shape).double()], double=fn is not attended)


@pytest.mark.parametrize("mesh", [W3, H4, HW, DATA_W], ids=["w3", "h4", "hw", "data_w"])
@pytest.mark.parametrize("name", CASES)
def test_patches_match_the_whole(name, mesh):
    run_ranks(run_case, num_ranks(mesh), name, mesh, backend="gloo")


def of_cut_channels(placements):
    """As VOLO's patches, which a product may have cut so."""
    mesh = device_mesh_of((W3 if len(placements) == 1 else HW)[0])
    torchtp.dtensor.mark(mesh, range(len(placements)))
    patches = torch.randn(2, 36, 99, generator=torch.Generator().manual_seed(0)).double()
    image = patches.view(2, 4, 27, 33)
    cut, cut_image = (distribute_tensor(whole, mesh, placements, src_data_rank=None) for whole in (patches, image))
    with torchtp.strict():
        folded = F.fold(cut, (9, 11), 3, padding=1)
        unfolded = F.unfold(cut_image, 3, padding=1)
    torch.testing.assert_close(folded.full_tensor(), F.fold(patches, (9, 11), 3, padding=1))
    torch.testing.assert_close(unfolded.full_tensor(), F.unfold(image, 3, padding=1))


@pytest.mark.parametrize("dims", [(1,), (1, 2), (2, 1), (1, 1)], ids=str)
def test_patches_of_cut_channels_are_folded(dims):
    run_ranks(of_cut_channels, 3 if len(dims) == 1 else num_ranks(HW), [Shard(dim) for dim in dims], backend="gloo")


def refused():
    mesh = device_mesh_of(W3[0])
    torchtp.dtensor.mark(mesh, [0])
    image = distribute_tensor(torch.randn(2, 4, 9, 11), mesh, [Shard(3)], src_data_rank=None)
    for numbers in ({"stride": 0}, {"dilation": 0}, {"kernel_size": 0}, {"padding": -1}):
        with pytest.raises(ValueError, match="unfold and fold: kernel size, dilation and stride must be positive"):
            F.unfold(image, **{"kernel_size": 3, **numbers})
    for size, step in ((2, 0), (2, -1), (12, 1)):
        with pytest.raises(ValueError, match="the step must be positive"):
            image.unfold(3, size, step)


def test_patches_without_steps_are_refused():
    run_ranks(refused, 3, backend="gloo")
