"""Views, slices, concatenations, flips, rolls and pads of cut DTensors equal the single device, without a gather."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from rules import H4, HW, W3, check, num_ranks

from torchtp.testing import run_ranks

IMAGE = (2, 4, 9, 11)


def filled_by_masks(x):
    x[x > 0.4] = 0.5
    x[:, :, (x[0, 0] < -0.5).detach()] = -1
    x[:, :, torch.arange(99).view(9, 11) % 7 == 0] = 2
    x[torch.tensor([False, True])] = 3
    return torch.ops.aten.index_put(x, [x > 0.2], torch.tensor(4.0).double())


def _pairs(x):
    return torch.view_as_complex(x.view(2, 2, 2, 9, 11).movedim(2, -1).contiguous())


def _doubled_as_complex(x):
    pairs = x.view(2, 2, 2, 9, 11).movedim(2, -1).contiguous()
    torch.view_as_complex(pairs).mul_(2j)
    return pairs


CASES = {
    "slice_cut": (lambda x: x[:, :, 1:8, 2:10] * 2, [IMAGE]),
    "slice_strided": (lambda x: x[:, :, 1::2, ::3] * 2, [IMAGE]),
    "slice_channels": (lambda x: x[:, 1:3] * 2, [IMAGE]),
    "select_row": (lambda x: x[:, :, 4] * 2, [IMAGE]),
    "select_column": (lambda x: x[..., -1] * 2, [IMAGE]),
    "select_channel": (lambda x: x[:, 1] * 2, [IMAGE]),
    "chunk_channels": (lambda x: x.chunk(2, 1)[0].sin() * x.chunk(2, 1)[1], [IMAGE]),
    "chunk_one_used": (lambda x: x.chunk(2, 1)[0].sin(), [IMAGE]),
    "split_cut": (lambda x: torch.cat([p.sin() for p in x.split([3, 8], 3)][::-1], 3), [IMAGE]),
    "cat_channels": (lambda x, y: torch.cat([x, y.sin()], 1), [IMAGE, (2, 3, 9, 11)]),
    "cat_cut": (lambda x, y: torch.cat([x, y.sin(), x], 3), [IMAGE, (2, 4, 9, 5)]),
    "cat_rows": (lambda x, y: torch.cat([x, y.sin()], 2), [IMAGE, (2, 4, 3, 11)]),
    "stack": (lambda x, y: torch.stack([x, y], 2), [IMAGE, IMAGE]),
    "unbind_channels": (lambda x: x.unbind(1)[2] * x.unbind(1)[0], [IMAGE]),
    "index_channels": (lambda x: x[:, [2, 1, 0, 2, 3]].sin(), [IMAGE]),
    "index_select": (lambda x: x.index_select(-3, torch.tensor([3, 3, 0])).sin(), [IMAGE]),
    "index_put": (
        lambda x, y: torch.ops.aten.index_put(x, [None, torch.tensor([3, 0])], y).sin(),
        [IMAGE, (2, 2, 9, 11)],
    ),
    "index_put_mask": (lambda x: filled_by_masks(x.sin()), [IMAGE]),
    "index_add": (lambda x, y: x.sin().index_add(1, torch.tensor([3, 3]), y, alpha=2), [IMAGE, (2, 2, 9, 11)]),
    "mask_of_rows": (lambda x: x.flatten(2).masked_fill((x > 0).flatten(2), 0.0).sin(), [IMAGE]),
    "mask_repeated": (lambda x: x.repeat_interleave(2, 2) * (x > 0).repeat_interleave(2, 2), [IMAGE]),
    "flip": (lambda x: x.flip(2, 3) * x, [IMAGE]),
    "rot90": (lambda x: x.rot90(1, (2, 3)).sin() * x.rot90(1, (3, 2)), [IMAGE]),
    "rot90_twice": (lambda x: x.rot90(2, (2, 3)).sin() + x.rot90(4, (2, 3)), [IMAGE]),
    "rot90_back": (lambda x: x.rot90(3, (-2, -1)).sin(), [IMAGE]),
    "roll": (lambda x: x.roll((2, -3), (2, 3)) * x, [IMAGE]),
    "roll_far": (lambda x: x.roll(-8, 3), [IMAGE]),
    "pad_zero": (lambda x: F.pad(x, (1, 2, 3, 0)).sin(), [IMAGE]),
    "pad_value": (lambda x: F.pad(x, (0, 5, 1, 1), value=1.5), [IMAGE]),
    "crop_by_pad": (lambda x: F.pad(x, (-2, -1, -3, 2)), [IMAGE]),
    "pad_channels": (lambda x: F.pad(x, (0, 0, 0, 0, 1, 1)), [IMAGE]),
    "permute": (lambda x: x.permute(0, 2, 3, 1).sin().permute(0, 3, 1, 2), [IMAGE]),
    "unsqueeze": (lambda x: x.unsqueeze(1).sin().squeeze(1), [IMAGE]),
    "channel_shuffle": (lambda x: x.view(2, 2, 2, 9, 11).transpose(1, 2).reshape(2, 4, 9, 11).sin(), [IMAGE]),
    "channel_shuffle_by_torch": (lambda x: F.channel_shuffle(x, 2).sin(), [IMAGE]),
    "cross": (lambda x, y: torch.linalg.cross(x[:, :3], y.sin(), dim=1), [IMAGE, (2, 3, 9, 11)]),
    "cross_of_one": (lambda x, y: torch.linalg.cross(x[:, 1:], y, dim=-3), [IMAGE, (1, 3, 1, 1)]),
    "complex": (lambda x: torch.view_as_real(_pairs(x.sin()) * 2).sin(), [IMAGE]),
    "complex_in_place": (lambda x: _doubled_as_complex(x.sin()), [IMAGE]),
    "merge_batch": (lambda x: x.reshape(8, 9, 11).sin().view(2, 4, 9, 11), [IMAGE]),
    "windows": (
        lambda x: (
            x.view(2, 4, 3, 3, 4, 3).permute(0, 2, 4, 1, 3, 5).sin().permute(0, 3, 1, 4, 2, 5).reshape(2, 4, 9, 12)
        ),
        [(2, 4, 9, 12)],
    ),
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2).sin(), [IMAGE]),
    "pixel_unshuffle": (lambda x: F.pixel_unshuffle(x, 2).sin(), [(2, 1, 10, 14)]),
    "expand": (lambda x: x.expand(2, 4, 9, 11).sin(), [(2, 1, 9, 11)]),
    "repeat": (lambda x: x.repeat(2, 1, 1, 1).sin(), [IMAGE]),
    "repeat_all": (lambda x: x.repeat(2, 1, 2, 3).sin(), [IMAGE]),
    "contiguous": (lambda x: x.permute(0, 2, 3, 1).contiguous().sin(), [IMAGE]),
    "channels_last": (lambda x: x.contiguous(memory_format=torch.channels_last).sin(), [IMAGE]),
    "one_pixel_more": (lambda x: x[:, :, :-1] - x[:, :, 1:], [IMAGE]),
    "merged_nothing": (lambda x: x[:0].view(0, 9 * 11).sin().view(0, 4, 9, 11) * 2, [IMAGE]),
    "unbatched": (lambda x: F.conv2d(x, torch.ones(2, 4, 3, 3).double(), padding=1), [(4, 9, 11)]),
}


def run_case(name, mesh, kwargs):
    from torch.distributed.device_mesh import init_device_mesh

    import torchtp

    torchtp.dtensor.mark(init_device_mesh("cpu", mesh[0]), range(len(mesh[0])))
    torch.manual_seed(0)
    fn, shapes = CASES[name]
    check(fn, mesh, [torch.randn(shape).double() for shape in shapes], **kwargs)


@pytest.mark.parametrize("mesh", [W3, H4, HW], ids=["w3", "h4", "h2_w2"])
@pytest.mark.parametrize("name", CASES)
def test_shape_ops_match_reference_without_a_gather(name, mesh):
    if name == "unbatched":
        mesh = (mesh[0], tuple(dim - 1 for dim in mesh[1]))
    run_ranks(run_case, num_ranks(mesh), name, mesh, {})
