"""torchtp.nn's fused layers: the blocks of the example equal the plain ones, with and without a process group, cut or not."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch
from models import make_layout
from torch import nn

import torchtp
from torchtp.testing import run_ranks

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from fused import FusedBlock, channel_norm
from networks import Block, ConvNeXt, draw_paths


def _pair(drop_path=0.0, dtype=torch.float64):
    torch.manual_seed(0)
    plain = ConvNeXt([1, 2], [8, 16], 3, drop_path).to(dtype)
    fused = ConvNeXt([1, 2], [8, 16], 3, drop_path, block=FusedBlock, norm=channel_norm).to(dtype)
    for parameter in plain.parameters():
        nn.init.normal_(parameter, std=0.3)
    fused.load_state_dict(plain.state_dict())
    return plain, fused


def _compare(plain, fused, image, tolerance):
    theirs, mine = (image.clone().requires_grad_() for _ in range(2))
    expected, found = plain(theirs)[-1], fused(mine)[-1]
    weight = torch.randn_like(expected)
    (expected * weight).sum().backward()
    (found * weight).sum().backward()
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=tolerance, atol=tolerance)
    for a, b in zip(fused.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("drop_path", [0.0, 0.5])
def test_fused_network_is_the_plain_one_without_a_process_group(layout, drop_path):
    assert not torch.distributed.is_initialized()
    plain, fused = _pair(drop_path)
    image = torch.randn(4, 3, 24, 40, dtype=torch.float64).contiguous(memory_format=layout)
    for network in (plain, fused):
        draw_paths(network, torch.Generator().manual_seed(1), 4, slice(None), torch.float64)
    _compare(plain, fused, image, 1e-9)


def test_fused_network_compiles_whole_without_a_process_group():
    plain, fused = _pair()
    compiled = torch.compile(fused, backend="aot_eager", fullgraph=True)
    image = torch.randn(2, 3, 24, 40, dtype=torch.float64)
    theirs, mine = plain(image)[-1], compiled(image)[-1]
    torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
    theirs.square().sum().backward()
    mine.square().sum().backward()
    for a, b in zip(fused.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-9)


def test_under_autocast_the_residual_keeps_its_dtype():
    block = FusedBlock(8, 0.0)
    image = torch.randn(2, 8, 9, 11, dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = block(image)
    out.float().sum().backward()
    assert out.dtype == torch.bfloat16
    assert {p.grad.dtype for p in block.parameters()} == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_depthwise_layer_norm_is_cast_as_autocast_casts_a_convolution(dtype):
    image, weight = torch.randn(2, 4, 6, 7, dtype=dtype), torch.randn(4, 1, 3, 3, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        found = torchtp.nn.depthwise_layer_norm(image, weight, None, None, None)
        convolved = nn.functional.conv2d(image, weight, groups=4)
    expected = torchtp.nn.depthwise_layer_norm(image.to(convolved.dtype), weight.to(convolved.dtype), None, None, None)
    assert found.dtype == convolved.dtype and torch.equal(found, expected)


def cut_blocks():
    layout = make_layout({"h": 2, "w": 2})
    image = torch.randn(2, 8, 9, 14, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    torch.manual_seed(0)
    plain, fused = Block(8, 0.5).double(), FusedBlock(8, 0.5).double()
    for parameter in plain.parameters():
        nn.init.normal_(parameter, std=0.3)
    fused.load_state_dict(plain.state_dict())
    for block in (plain, fused):
        block.drop_path.mask = torch.tensor([0.0, 2.0], dtype=torch.float64).view(-1, 1, 1, 1)
    cut = torchtp.parallelize(copy.deepcopy(fused), layout, output="full")
    theirs, mine = (image.clone().requires_grad_() for _ in range(2))
    expected = plain(theirs)
    with torchtp.strict():
        found = cut(mine)
    expected.square().sum().backward()
    found.square().sum().backward()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
    tile = layout.tile(image.shape)
    torch.testing.assert_close(mine.grad[tile], theirs.grad[tile], rtol=1e-9, atol=1e-10)
    for (name, a), b in zip(cut.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-10, msg=lambda text, name=name: name + text)


def test_fused_block_is_exact_on_cut_images():
    run_ranks(cut_blocks, 4, backend="torchtp", timeout=120)


def test_layer_scale_module_takes_a_mask():
    layer = torchtp.nn.LayerScale(4, 0.5)
    residual, branch, keep = torch.randn(2, 4, 3), torch.randn(2, 4, 3), torch.tensor([0.0, 2.0])
    torch.testing.assert_close(layer(residual, branch, keep), residual + branch * keep.view(2, 1, 1) / 2)
    assert [name for name, _ in layer.named_parameters()] == ["gamma"]


class Dropping(nn.Module):
    """A block whose mask is made of an activation, as drop paths make it."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.scale = torchtp.nn.LayerScale(4, 0.5)

    def forward(self, x):
        return self.scale(x, self.conv(x), 2 * x.new_empty(len(x)).bernoulli_(1.0))


def _mask_of_an_activation():
    torch.manual_seed(0)
    single = Dropping().double()
    model = torchtp.parallelize(copy.deepcopy(single), make_layout({"w": 2}), output="full")
    image = torch.randn(2, 4, 5, 7, dtype=torch.float64)
    torch.testing.assert_close(model(image), single(image))
    with pytest.raises(TypeError, match="both cut or both plain"):
        torchtp.nn.layer_scale(make_layout({"w": 2}).shard(image), image, None)


def test_layer_scale_takes_a_mask_made_of_an_activation():
    run_ranks(_mask_of_an_activation, 2)
