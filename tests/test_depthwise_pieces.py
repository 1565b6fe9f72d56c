"""Depthwise convolution by the kernels' twin, halos left where they arrive, against F.conv2d of the whole image."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.sharding import Sharding, left_where_they_arrive, random_layout, shardings
from torchtp.testing import run_ranks

OPS = torch.ops.torchtp
# Of the largest value: a rounding of the result, and sums in float32.
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def _window(rng: random.Random) -> tuple[list[int], list[int], list[int], list[int]]:
    """Kernel, stride, padding, dilation of both dims: those with programs of their own, and others."""
    kernel = rng.choice([[3, 3], [5, 5], [7, 7], [7, 7], [9, 9], [4, 4], [3, 6], [1, 1]])
    stride = rng.choice([[1, 1], [1, 1], [2, 2], [2, 2], [3, 2], [1, 4]])
    dilation = rng.choice([[1, 1], [1, 1], [2, 1], [2, 3]])
    return kernel, stride, [rng.randint(0, k // 2 + 1) for k in kernel], dilation


def _images(rng: random.Random, extents: list[int], kernel: list[int], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    channels = rng.choice([1, 3, 4, 36])
    x = torch.randn(rng.choice([1, 2]), channels, *extents, dtype=torch.float64).to(dtype)
    weight = torch.randn(channels, 1, *kernel, dtype=torch.float64).to(dtype)
    bias = torch.randn(channels, dtype=torch.float64).to(dtype)
    return x.contiguous(memory_format=random_layout(rng, 4)), weight, bias


def _close(found: torch.Tensor, expected: torch.Tensor, rounding: float, what: object) -> None:
    assert found.shape == expected.shape, what
    if expected.numel():
        error = (found.double() - expected).abs().max().item()
        assert error <= rounding * max(expected.abs().max().item(), 1e-3), (what, error)


def _case(rng: random.Random, sharding: Sharding, dtype: torch.dtype) -> None:
    kernel, stride, padding, dilation = _window(rng)
    smallest = [max(1, d * (k - 1) + 1 - 2 * p) for k, p, d in zip(kernel, padding, dilation, strict=True)]
    x, weight, bias = _images(rng, [s + rng.randint(0, 20) for s in smallest], kernel, dtype)
    what = (sharding, x.shape, kernel, stride, padding, dilation, x.stride())
    whole, filters = x.double().requires_grad_(), weight.double().requires_grad_()
    y = F.conv2d(whole, filters, bias.double(), stride, padding, dilation, x.shape[1])
    cut = sharding.cut(x)
    own = sharding.shard(x)
    found = OPS.depthwise(own, weight, bias, stride, padding, dilation, *cut)
    rounding = ROUNDING[dtype]
    _close(found, sharding.shard(y), rounding, (what, "output"))

    grad = torch.randn(y.shape, dtype=torch.float64).to(dtype).contiguous(memory_format=random_layout(rng, 4))
    dx, dw = torch.autograd.grad(y, (whole, filters), grad.double())
    mine = OPS.depthwise_backward(sharding.shard(grad), own, weight, stride, padding, dilation, *cut)
    _close(mine[0], sharding.shard(dx), 2 * rounding, (what, "gradient of the input"))
    share = mine[1].double()
    dist.all_reduce(share)
    _close(share, dw, 2 * rounding, (what, "gradient of the filters"))


def _cases(seed: int, num: int, dtypes: list[torch.dtype]) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    ways = shardings((2, 3))
    with left_where_they_arrive(ways):
        for index in range(num):
            _case(rng, ways[index % len(ways)], dtypes[index % len(dtypes)])


@pytest.mark.parametrize(("backend", "size"), [("gloo", 2), ("torchtp", 4)])
def test_halos_are_read_where_they_arrive(backend, size):
    run_ranks(_cases, size, size, 20, [torch.float32], backend=backend)


def test_halos_of_16_bit():
    run_ranks(_cases, 2, 7, 8, [torch.bfloat16, torch.float16], backend="torchtp")


def test_one_rank_has_no_halo():
    run_ranks(_cases, 1, 3, 8, [torch.float32])


def _narrow() -> None:
    """A 7 x 7 kernel over shards of one row or none, in both dims."""
    rng = random.Random(1)
    for extents in ([3, 5], [4, 3], [5, 2]):
        for sharding in (Sharding((4,), (2,)), Sharding((4,), (3,)), Sharding((2, 2), (2, 3))):
            x, weight, bias = _images(rng, extents, [7, 7], torch.float32)
            cut = sharding.cut(x)
            whole, filters = x.double().requires_grad_(), weight.double().requires_grad_()
            y = F.conv2d(whole, filters, bias.double(), 1, 3, 1, x.shape[1])
            found = OPS.depthwise(sharding.shard(x), weight, bias, [1, 1], [3, 3], [1, 1], *cut)
            _close(found, sharding.shard(y), 1e-5, (extents, sharding))
            dx, dw = torch.autograd.grad(y.sum(), (whole, filters))
            ones = sharding.shard(torch.ones_like(y, dtype=torch.float32))
            mine = OPS.depthwise_backward(ones, sharding.shard(x), weight, [1, 1], [3, 3], [1, 1], *cut)
            _close(mine[0], sharding.shard(dx), 1e-5, (extents, sharding, "gradient of the input"))
            share = mine[1].double()
            dist.all_reduce(share)
            _close(share, dw, 1e-5, (extents, sharding, "gradient of the filters"))


def test_shards_of_one_row_or_none():
    run_ranks(_narrow, 4, backend="torchtp")


def test_windows_beyond_a_block_are_refused():
    x = torch.zeros(1, 2, 8, 40)
    for kernel, stride, dilation in (
        ([3, 3], [1, 5], [1, 1]),
        ([3, 32], [1, 1], [1, 1]),
        ([3, 3], [1, 1], [1, 300_000_000]),
    ):
        args = x, torch.zeros(2, 1, *kernel), None, stride, [1, 1], dilation, [], [], []
        with pytest.raises(
            ValueError, match=r"depthwise: kernels go up to 31, strides up to 4 and dilations .* takes all"
        ):
            OPS.depthwise(*args)


def test_the_widest_dilation():
    x, weight, wide = torch.randn(1, 2, 5, 7), torch.randn(2, 1, 3, 31), 1 << 24
    y = OPS.depthwise(x, weight, None, [1, 1], [wide, 15 * wide], [wide, wide], [], [], [])
    _close(y, x * weight[:, 0, 1, 15].view(2, 1, 1), 1e-6, "only the tap in the middle meets the image")


X, W = torch.randn(2, 8, 6, 6), torch.randn(8, 1, 3, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: X[0]}, r"\[N, C, H, W\], got 3 dims"),
        ({1: W[:4]}, "one filter a channel"),
        ({1: W[..., :0]}, "a kernel has one tap or more"),
        ({2: torch.ones(2)}, r"sizes of bias are \[8\] here, got \[2\]"),
        ({3: [0, 0]}, "stride must be positive"),
        ({3: [1]}, "stride needs a number for each of 2"),
        ({4: [1]}, "padding needs a number for each of 2"),
        ({5: [0, 1]}, "dilation must be positive"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    args = [X, W, None, [1, 1], [1, 1], [1, 1], [], [], []]
    for place, value in change.items():
        args[place] = value
    with pytest.raises(ValueError, match=f"depthwise: .*{message}"):
        OPS.depthwise(*args)
    if 2 not in change:
        with pytest.raises(ValueError, match=f"depthwise_backward: .*{message}"):
            OPS.depthwise_backward(X, *args[:2], *args[3:])


def test_gradients_of_other_sizes_are_refused():
    for grad in (X[:1], X[:, :2], X[:, :, :3], X.repeat(1, 1, 2, 2), X[0]):
        with pytest.raises(ValueError, match="depthwise_backward: the sizes of grad_output are"):
            OPS.depthwise_backward(grad, X, W, [1, 1], [1, 1], [1, 1], [], [], [])
