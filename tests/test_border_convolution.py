"""Convolutions that compute what reads halos apart from the rest, against PyTorch's on the whole tensor."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

from tests.sharding import Sharding, assert_same, random_layout, shardings, total
from torchtp.testing import run_ranks

OPS = torch.ops.torchtp


def _draw(rng: random.Random, cut: Sharding) -> tuple[list[int], ...]:
    """Extents, kernel, stride, padding and dilation; the usual ones often, so that most parts are plain."""
    kernel = [rng.choice([1, 2, 3, 3, 3, 5, 7]) for _ in range(2)]
    usual = rng.random() < 0.7
    stride = [rng.choice([1, 1, 2] if usual else [1, 2, 3]) for _ in range(2)]
    dilation = [1 if usual else rng.randint(1, 2) for _ in range(2)]
    reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    padding = [r // 2 if usual else rng.randint(0, r + 2) for r in reach]
    extents = [max(r + 1 - 2 * p, 1) + rng.randint(2, 12) for r, p in zip(reach, padding, strict=True)]
    for axis, dim in enumerate(cut.dims):
        each = max(reach[dim - 2], 2) if usual else rng.randint(2, 6)
        extents[dim - 2] = cut.shape[axis] * stride[dim - 2] * each - rng.choice([0, 0, 1])
    fits = all(e + 2 * p > r for e, p, r in zip(extents, padding, reach, strict=True))
    return (extents, kernel, stride, padding, dilation) if fits else _draw(rng, cut)


def _cases(seed: int, wanted: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    done = tried = 0
    while done < wanted:
        tried += 1
        assert tried < 20 * wanted, f"{done} of {tried} cases have plain parts"
        cut = rng.choice(shardings((2, 3)))
        extents, *window = _draw(rng, cut)
        kernel, stride, padding, dilation = window
        groups = rng.choice([1, 1, 2])
        x = torch.randn(2, 4, *extents, dtype=torch.float64).contiguous(memory_format=random_layout(rng, 4))
        weight, bias = torch.randn(6, 4 // groups, *kernel, dtype=x.dtype), torch.randn(6, dtype=x.dtype)
        what = (cut, extents, *window, groups, x.stride())
        whole, filters = x.requires_grad_(), weight.requires_grad_()
        y = F.conv2d(whole, filters, bias, stride, padding, dilation, groups)
        part = cut.shard(x.detach())
        try:
            out = OPS.border_convolution(part, weight, bias, stride, padding, dilation, groups, *cut.cut(x))
        except ValueError as error:
            assert "torchtp::convolution takes all" in str(error)
            continue
        done += 1
        assert_same(out.detach(), cut.shard(y.detach()), what)
        dy = torch.randn_like(y)
        dx, dw = torch.autograd.grad(y, (whole, filters), dy)
        mine = OPS.border_convolution_backward(
            cut.shard(dy), part, weight, stride, padding, dilation, groups, *cut.cut(x)
        )
        assert_same(mine[0].detach(), cut.shard(dx), (what, "dx"))
        assert_same(total(mine[1]), dw, (what, "dw"))
    assert done > tried / 3, f"only {done} of {tried} cases have plain parts"


@pytest.mark.parametrize(("backend", "size"), [("gloo", 2), ("torchtp", 3), ("torchtp", 4)])
def test_the_border_apart_is_the_whole(backend, size):
    run_ranks(_cases, size, size, 60, backend=backend)


def _refused() -> None:
    cut = shardings((3,))[0]
    x, weight = torch.randn(2, 4, 8, 8), torch.randn(4, 4, 3, 3)
    part, lists, numbers = cut.shard(x), cut.cut(x), ([1, 1], [1, 1], [1, 1], 1)
    with pytest.raises(ValueError, match="border_convolution: stride must be positive"):
        OPS.border_convolution(part, weight, None, [0, 0], *numbers[1:], *lists)
    with pytest.raises(ValueError, match="border_convolution: the sizes of bias are"):
        OPS.border_convolution(part, weight, torch.ones(2), *numbers, *lists)
    with pytest.raises(ValueError, match="border_convolution: dim 3 of global extent 8 over 2 ranks gives rank"):
        OPS.border_convolution(x, weight, None, *numbers, *lists)
    for grad in (part[:1], part[:, :2], part[:, :, :4], part[..., :3], part.repeat(1, 1, 1, 2)):
        with pytest.raises(ValueError, match="border_convolution_backward: the sizes of grad_output are"):
            OPS.border_convolution_backward(grad, part, weight, *numbers, *lists)


def test_what_does_not_fit_is_refused():
    run_ranks(_refused, 2)
