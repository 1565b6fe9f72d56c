"""max_pool and avg_pool cut over ranks against PyTorch's on the whole tensor."""

from __future__ import annotations

import random
import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sharding import assert_same, layout_of, random_layout, shardings

from torchtp.testing import RanksFailed, run_ranks

MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
AVG = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


def draw(rng, dims):
    """Extents of the spatial dims and the numbers of a pooling that fits."""
    while True:
        extents = [rng.randint(1, (30, 14, 9)[dims - 1]) for _ in range(dims)]
        kernel = [rng.randint(1, 6) for _ in range(dims)]
        stride = [rng.randint(1, 4) for _ in range(dims)]
        dilation = [rng.randint(1, 3) for _ in range(dims)]
        padding = [rng.randint(0, k // 2) for k in kernel]
        if all(L + 2 * p >= d * (k - 1) + 1 for L, k, p, d in zip(extents, kernel, padding, dilation, strict=True)):
            return extents, kernel, stride, padding, dilation


def max_pools(seed, count):
    import torchtp  # noqa: F401

    rng = random.Random(seed)
    torch.manual_seed(seed)
    for case in range(count):
        dims = case % 3 + 1
        extents, kernel, stride, padding, dilation = draw(rng, dims)
        ceil = rng.random() < 0.5
        cut = rng.choice(shardings(range(2, 2 + dims)))
        x = torch.randn(2, 3, *extents, dtype=torch.float64)
        x = x.contiguous(memory_format=random_layout(rng, x.dim()))
        if rng.random() < 0.2 and (dims < 3 or x.is_contiguous()):  # ATen leaves the depth out of these indices in 3-D
            x.fill_(-torch.inf)
        elif rng.random() < 0.2:
            x[..., rng.randrange(extents[-1])] = torch.nan
        elif rng.random() < 0.3:
            x.round_()  # ties
        x.requires_grad_()
        what = (case, dims, extents, kernel, stride, padding, dilation, ceil, cut, layout_of(x))
        y, places = MAX[dims](x, kernel, stride, padding, dilation, ceil, return_indices=True)
        dy = torch.randn(y.shape, dtype=y.dtype, requires_grad=True)
        if rng.random() < 0.2:
            dy = torch.ones(1, dtype=y.dtype).expand(y.shape).requires_grad_()

        part = cut.shard(x)
        args = (kernel, stride, padding, dilation, ceil, *cut.cut(x))
        out, indices = torch.ops.torchtp.max_pool(part, *args)
        assert torch.equal(out.nan_to_num(), cut.shard(y).nan_to_num()), what
        assert_same(indices, cut.shard(places), what, 0)
        dout = cut.shard(dy)
        (dx,) = torch.autograd.grad(y, x, dy, create_graph=True)
        (dpart,) = torch.autograd.grad(out, part, dout, create_graph=True)
        assert_same(dpart.detach(), cut.shard(dx).detach(), what)
        v = torch.randn_like(dx)
        (ddy,) = torch.autograd.grad(dx, dy, v)
        (ddout,) = torch.autograd.grad(dpart, dout, cut.shard(v))
        assert_same(ddout, cut.shard(ddy), what)


def avg_pools(seed, count):
    import torchtp  # noqa: F401

    rng = random.Random(seed)
    torch.manual_seed(seed)
    for case in range(count):
        dims = case % 3 + 1
        extents, kernel, stride, padding, _ = draw(rng, dims)
        if any(L + (0 if dims == 3 else 2 * p) < k for L, k, p in zip(extents, kernel, padding, strict=True)):
            continue  # ATen's avg_pool3d refuses kernels wider than the input
        ceil, include = rng.random() < 0.5, rng.random() < 0.5
        override = rng.choice([None, 7]) if dims > 1 else None
        cut = rng.choice(shardings(range(2, 2 + dims)))
        x = torch.randn(2, 3, *extents, dtype=torch.float64)
        x = x.contiguous(memory_format=random_layout(rng, x.dim())).requires_grad_()
        what = (case, dims, extents, kernel, stride, padding, ceil, include, override, cut, layout_of(x))
        y = AVG[dims](x, kernel, stride, padding, ceil, include, *([override] if dims > 1 else []))
        dy = torch.randn(y.shape, dtype=y.dtype, requires_grad=True)

        part = cut.shard(x)
        out = torch.ops.torchtp.avg_pool(part, kernel, stride, padding, ceil, include, override, *cut.cut(x))
        assert_same(out.detach(), cut.shard(y).detach(), what)
        dout = cut.shard(dy)
        (dx,) = torch.autograd.grad(y, x, dy, create_graph=True)
        (dpart,) = torch.autograd.grad(out, part, dout, create_graph=True)
        assert_same(dpart.detach(), cut.shard(dx).detach(), what)
        v = torch.randn_like(dx)
        (ddy,) = torch.autograd.grad(dx, dy, v)
        (ddout,) = torch.autograd.grad(dpart, dout, cut.shard(v))
        assert_same(ddout, cut.shard(ddy), what)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_max_pool_matches_the_whole(size):
    run_ranks(max_pools, size, size, 60)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_avg_pool_matches_the_whole(size):
    run_ranks(avg_pools, size, size, 60)


def stem(dtype):
    """What ResNet's stem and DenseNet's transitions do, in the dtypes of training."""
    import torchtp  # noqa: F401

    for cut in shardings((2, 3)):
        for layout in (torch.contiguous_format, torch.channels_last):
            x = torch.randn(2, 4, 21, 26).to(dtype).contiguous(memory_format=layout).requires_grad_()
            y = F.max_pool2d(x, 3, 2, 1)
            z = F.avg_pool2d(y, 2)
            z.sum().backward()
            part = cut.shard(x)
            out, _ = torch.ops.torchtp.max_pool(part, [3, 3], [2], [1], [1], False, *cut.cut(x))
            last = torch.ops.torchtp.avg_pool(out, [2, 2], [], [0], False, True, None, *cut.cut(y))
            last.sum().backward()
            tolerance = 1e-5 if dtype == torch.float32 else 1e-2
            assert_same(out, cut.shard(y), (cut, layout), 0)
            assert_same(last, cut.shard(z), (cut, layout), tolerance)
            assert_same(part.grad, cut.shard(x.grad), (cut, layout), tolerance)
            if 0 not in out.shape:
                assert layout_of(out) == layout_of(y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_pools_keep_dtype_and_layout(dtype):
    run_ranks(stem, 4, dtype)


def integers():
    import torchtp  # noqa: F401

    x = torch.randint(-100, 0, (1, 2, 9, 9))
    cut = shardings((2, 3))[-1]
    y = F.max_pool2d(x, 3, 2, 1)
    out, _ = torch.ops.torchtp.max_pool(cut.shard(x), [3, 3], [2], [1], [1], False, *cut.cut(x))
    assert_same(out, cut.shard(y), cut, 0)


def test_max_pool_takes_integers():
    run_ranks(integers, 2)


def pool_of_too_much(kernel, padding):
    import torchtp  # noqa: F401

    x = torch.randn(1, 1, 4, 4)
    cut = shardings((2,))[0]
    torch.ops.torchtp.max_pool(cut.shard(x), [kernel, kernel], [1], [padding], [1], False, *cut.cut(x))


@pytest.mark.parametrize(
    ("kernel", "padding", "match"), [(7, 1, "does not fit into dim 2 of global extent 4"), (3, 2, "at most half")]
)
def test_what_does_not_fit_is_refused_on_all_ranks(kernel, padding, match):
    with pytest.raises(RanksFailed, match=match) as failed:
        run_ranks(pool_of_too_much, 2, kernel, padding)
    assert sorted(failed.value.failures) == [0, 1]


def opchecks():
    import torchtp  # noqa: F401

    for cut in shardings((2, 3)):
        x = torch.randn(2, 3, 9, 10, dtype=torch.float64)
        part = cut.shard(x).requires_grad_()
        pool = ([3, 3], [2, 2], [1, 1], [1, 1], False, *cut.cut(x))
        out, indices = torch.ops.torchtp.max_pool(part, *pool)
        dout = torch.randn_like(out).requires_grad_()
        average = ([3, 3], [2, 2], [1, 1], False, True, None, *cut.cut(x))
        for op, args in (
            (torch.ops.torchtp.max_pool, (part, *pool)),
            (torch.ops.torchtp.max_pool_backward, (dout, indices, part.shape, *pool)),
            (torch.ops.torchtp.max_pool_gather, (part, indices, *pool)),
            (torch.ops.torchtp.avg_pool, (part, *average)),
            (torch.ops.torchtp.avg_pool_backward, (dout, part.shape, *average)),
        ):
            torch.library.opcheck(op.default, args)
    assert dist.get_world_size() == 2


def test_pools_pass_opcheck():
    run_ranks(opchecks, 2)


def refused(which):
    """What backwards and gather of a pool of 2 x 2 say of other arguments than theirs: of a whole plane and of a part."""
    import torchtp  # noqa: F401

    ops, pool, messages = torch.ops.torchtp, ([2, 2], [2, 2], [0, 0], [1, 1], False), []
    x = torch.randn(2, 3, 4, 8)
    for part, cut in ((x, ([], [], [])), (shardings((3,))[0].shard(x), shardings((3,))[0].cut(x))):
        out, indices = ops.max_pool(part, *pool, *cut)
        change = WRONG[which][0](indices)
        args = {"grad": out, "indices": indices, "sizes": list(part.shape), **change}
        calls = [(ops.max_pool_backward, (*args.values(), *pool, *cut))]
        if "indices" in change:
            calls.append((ops.max_pool_gather, (part, args["indices"], *pool, *cut)))
        else:
            average = (*pool[:3], False, True, None, *cut)
            calls.append((ops.avg_pool_backward, (args["grad"], args["sizes"], *average)))
        for op, arguments in calls:
            with pytest.raises(ValueError) as caught:
                op(*arguments)
            messages.append(str(caught.value))
    return messages


WRONG = {
    "far": (lambda i: {"indices": i + 10**9}, "an index is that of an element that its window reads"),
    "outside": (lambda i: {"indices": torch.full_like(i, 64)}, "in the global plane, got 64"),
    "negative": (lambda i: {"indices": torch.full_like(i, -1)}, "in the global plane, got -1"),
    "wrapping": (lambda i: {"indices": i + 2**32}, "an index is that of an element that its window reads"),
    "int32": (lambda i: {"indices": i.int()}, "indices are int64, got Int"),
    "fewer": (lambda i: {"indices": i[:1]}, "sizes of indices are"),
    "gradient": (lambda i: {"grad": torch.randn(2, 3, 1, 1)}, "sizes of grad_output are"),
    "channels": (lambda i: {"sizes": [2, 9, *i.shape[2:]]}, "sizes of grad_output are|ranks gives rank"),
    "no sizes": (lambda i: {"sizes": []}, "but the input only 0 dims"),
}


@pytest.mark.parametrize("which", WRONG)
def test_indices_and_sizes_that_are_not_the_pools_are_refused(which):
    for messages in run_ranks(refused, 2, which):
        assert messages and all(re.search(WRONG[which][1], text) for text in messages), messages


def test_windows_without_steps_are_refused():
    import torchtp  # noqa: F401

    x, ops = torch.randn(2, 3, 4, 6), torch.ops.torchtp
    for pool in (([2, 2], [0, 2], [0], [1]), ([0, 2], [1], [0], [1]), ([2, 2], [1], [0], [0]), ([2], [-1], [0], [1])):
        with pytest.raises(ValueError, match="kernel_size, stride and dilation must be positive"):
            ops.max_pool(x, *pool, False, [], [], [])
    with pytest.raises(ValueError, match="kernel_size needs one to three entries, got 0"):
        ops.avg_pool(x, [], [], [0], False, True, None, [], [], [])
