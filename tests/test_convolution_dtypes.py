"""Convolutions in fp32 and 16 bit, which the CPU has a library for, cut over ranks against PyTorch's on the whole tensor."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from sharding import assert_same, draw_convolution, layout_of, leaf, random_layout, shardings, total

from torchtp.testing import run_ranks


def narrow_parts(transposed):
    """One column a rank, of outputs or of what a transposed one reads: there PyTorch's own of 16 bits are wrong."""
    import torchtp  # noqa: F401

    torch.manual_seed(0)
    size = dist.get_world_size()
    cut = shardings([3])[0]
    assert cut.cut(torch.empty(1, 1, 1, size))[0] == [3]
    for kernel, stride, padding in [(3, 2, 1), (2, 2, 0), (3, 3, 1), (2, 3, 0), (5, 4, 2)]:
        for channels in (3, 4, 16):
            columns, filters = (size, (channels, 4)) if transposed else (stride * size, (4, channels))
            x = torch.randn(1, channels, 10, columns, dtype=torch.bfloat16).requires_grad_()
            weight = torch.randn(*filters, kernel, kernel, dtype=torch.bfloat16).requires_grad_()
            args = ([stride] * 2, [padding] * 2, [1, 1], transposed, [0, 0], 1)
            what = (kernel, stride, padding, channels)
            wide = [t.detach().double().requires_grad_() for t in (x, weight)]
            y = torch.ops.aten.convolution(*wide, None, *args)
            assert (x if transposed else y).size(3) == size, what
            dy = torch.randn(y.shape, dtype=torch.bfloat16)
            part, w = leaf(cut.shard(x)), leaf(weight)
            out = torch.ops.torchtp.convolution(part, w, None, *args, *cut.cut(x))
            dx, dw = torch.autograd.grad(out, (part, w), cut.shard(dy).contiguous())
            theirs = torch.autograd.grad(y, wide, dy.double())
            close = {"rtol": 0.02, "atol": 0.02 * kernel * channels**0.5}
            torch.testing.assert_close(out.detach().double(), cut.shard(y.detach()), **close, msg=str(what))
            torch.testing.assert_close(dx.double(), cut.shard(theirs[0]), **close, msg=str((what, "dx")))
            torch.testing.assert_close(total(dw.double()), theirs[1], rtol=0.05, atol=0.2, msg=str((what, "dw")))


@pytest.mark.parametrize("transposed", [False, True])
def test_parts_of_one_column_in_16_bits(transposed):
    run_ranks(narrow_parts, 3, transposed)


def short_numbers(seed, count):
    """What the CPU has a library for, whose gradients of filters take other numbers than the rest."""
    import torchtp  # noqa: F401

    rng = random.Random(seed)
    torch.manual_seed(seed)
    for case in range(count):
        dims, transposed, groups = case % 3 + 1, rng.random() < 0.3, rng.choice([1, 2])
        extents, *numbers, extra = draw_convolution(rng, dims, transposed)
        kernel, stride, padding, dilation = numbers
        dtype, tolerance = rng.choice([(torch.float32, 2e-5), (torch.bfloat16, 3e-2)])
        cut = rng.choice(shardings(range(2, 2 + dims)))
        x = torch.randn(2, 16, *extents, dtype=dtype)
        x = x.contiguous(memory_format=random_layout(rng, x.dim())).requires_grad_()
        weight = leaf(torch.randn(16, 16 // groups, *kernel, dtype=dtype))
        args = (stride, padding, dilation, transposed, extra, groups)
        what = (case, extents, kernel, *args, cut, layout_of(x), dtype)
        wide = [t.detach().double().requires_grad_() for t in (x, weight)]
        y = torch.ops.aten.convolution(*wide, None, *args)
        windows = (x if transposed else y).shape[2:]
        whole = [dim for dim in range(dims) if dim + 2 not in cut.dims]
        lone = any(stride[dim] > 1 and windows[dim] == 1 for dim in whole)
        if dtype == torch.bfloat16 and (dims == 3 or lone):
            continue  # PyTorch's own are wrong there, or crash (2.13, AVX-512 and AMX)
        dy = torch.randn(y.shape, dtype=dtype)
        part, w = leaf(cut.shard(x)), leaf(weight)
        out = torch.ops.torchtp.convolution(part, w, None, *args, *cut.cut(x))
        dx, dw = torch.autograd.grad(out, (part, w), cut.shard(dy))
        whole_dx, whole_dw = torch.autograd.grad(y, wide, dy.double())
        assert_same(out.detach().double(), cut.shard(y).detach(), what, tolerance)
        assert_same(dx.double(), cut.shard(whole_dx), (what, "dx"), tolerance)
        assert_same(total(dw.double()), whole_dw, (what, "dw"), tolerance)


@pytest.mark.parametrize("size", [2, 3])
def test_convolutions_in_short_numbers_match_the_whole(size):
    run_ranks(short_numbers, size, size, 90)
