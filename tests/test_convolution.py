"""convolution and pull cut over ranks against PyTorch's on the whole tensor; their adjoints."""

from __future__ import annotations

import random
import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sharding import assert_same, draw_convolution, layout_of, leaf, random_layout, shardings, total

from torchtp.testing import RanksFailed, run_ranks


def convolutions(seed, count):
    import torchtp  # noqa: F401

    rng = random.Random(seed)
    torch.manual_seed(seed)
    for case in range(count):
        dims, transposed, groups = case % 3 + 1, rng.random() < 0.4, rng.choice([1, 2])
        extents, kernel, stride, padding, dilation, extra = draw_convolution(rng, dims, transposed)
        cut = rng.choice(shardings(range(2, 2 + dims)))
        x = torch.randn(2, 4, *extents, dtype=torch.float64)
        x = x.contiguous(memory_format=random_layout(rng, x.dim())).requires_grad_()
        weight = torch.randn(*((4, 6 // groups) if transposed else (6, 4 // groups)), *kernel, dtype=x.dtype)
        bias = torch.randn(6, dtype=x.dtype)
        weight, bias = leaf(weight), leaf(bias)
        args = (stride, padding, dilation, transposed, extra, groups)
        what = (case, extents, kernel, *args, cut, layout_of(x))
        y = torch.ops.aten.convolution(x, weight, bias, *args)
        dy = torch.randn(y.shape, dtype=y.dtype, requires_grad=True)
        if rng.random() < 0.2:
            dy = torch.ones((), dtype=y.dtype).expand(y.shape).requires_grad_()

        part, w, b = cut.shard(x), leaf(weight), leaf(bias)
        out = torch.ops.torchtp.convolution(part, w, b, *args, *cut.cut(x))
        assert_same(out.detach(), cut.shard(y).detach(), what)
        dout = cut.shard(dy)
        grads = torch.autograd.grad(y, (x, weight, bias), dy, create_graph=True)
        mine = torch.autograd.grad(out, (part, w, b), dout, create_graph=True)
        assert_same(mine[0].detach(), cut.shard(grads[0]).detach(), (what, "dx"))
        for share, whole in zip(mine[1:], grads[1:], strict=True):
            assert_same(total(share), whole.detach(), (what, "dw, db"))
        v = [torch.randn_like(g) for g in grads]
        theirs = torch.autograd.grad(grads, (dy, x, weight), v)
        ours = torch.autograd.grad(mine, (dout, part, w), (cut.shard(v[0]), *v[1:]))
        for i, (a, e) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(*((total(a), e) if i == 2 else (a, cut.shard(e))), (what, "second", i))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_convolution_matches_the_whole(size):
    run_ranks(convolutions, size, size, 60)


def a_filter_each(seed, count):
    """Depthwise, whose gradients of filters and of dilated inputs the CPU has steps of its own for; in 1 and 2 images."""
    import torchtp  # noqa: F401

    rng = random.Random(seed)
    torch.manual_seed(seed)
    for case in range(count):
        extents, kernel, stride, padding, dilation, extra = draw_convolution(rng, 2, False)
        images, channels = rng.choice([1, 2]), rng.choice([1, 3, 8, 19])
        dtype, tolerance = rng.choice([(torch.float64, 1e-10), (torch.float32, 2e-5)])
        cut = rng.choice(shardings((2, 3)))
        x = torch.randn(images, channels, *extents, dtype=dtype)
        if rng.random() < 0.3:  # tokens seen as an image
            x = x.flatten(2).transpose(1, 2).contiguous().transpose(1, 2).view(images, -1, *extents)
        else:
            x = x.contiguous(memory_format=random_layout(rng, 4))
        weight = torch.randn(channels, 1, *kernel, dtype=dtype)
        x.requires_grad_(), weight.requires_grad_()
        args = (stride, padding, dilation, False, extra, channels)
        what = (case, x.shape, x.stride(), kernel, *args, cut, dtype)
        y = torch.ops.aten.convolution(x, weight, None, *args)
        dy = torch.randn_like(y)
        part, w = cut.shard(x), leaf(weight)
        if images == 1 and x.stride(1) == 1:
            strides = (channels, 1, channels * part.size(3), channels)  # one image's own says nothing
            part = part.contiguous(memory_format=torch.channels_last).as_strided(part.shape, strides)
        part = part.detach().requires_grad_()
        out = torch.ops.torchtp.convolution(part, w, None, *args, *cut.cut(x))
        assert_same(out.detach(), cut.shard(y).detach(), what, tolerance)
        grads = torch.autograd.grad(y, (x, weight), dy)
        mine = torch.autograd.grad(out, (part, w), cut.shard(dy))
        assert_same(mine[0], cut.shard(grads[0]), (what, "dx"), tolerance)
        assert_same(total(mine[1]), grads[1], (what, "dw"), tolerance)


@pytest.mark.parametrize("size", [1, 3])
def test_a_filter_each_matches_the_whole(size):
    run_ranks(a_filter_each, size, size, 80)


def stack():
    """Layers on layers, in fp32 and both layouts: what a network does."""
    import torchtp  # noqa: F401

    for cut in shardings((2, 3)):
        for layout in (torch.contiguous_format, torch.channels_last):
            x = torch.randn(2, 3, 37, 29).contiguous(memory_format=layout).requires_grad_()
            weights = [torch.randn(8, 3, 7, 7) / 12, torch.randn(8, 1, 7, 7) / 7, torch.randn(4, 8, 3, 3) / 8]
            steps = [((2, 2), (3, 3), 1), ((1, 1), (3, 3), 8), ((2, 2), (0, 0), 1)]
            first = cut.shard(x)
            whole, part = x, first
            for weight, (stride, padding, groups) in zip(weights, steps, strict=True):
                lists = cut.cut(whole)
                whole = F.conv2d(whole, weight, None, stride, padding, 1, groups).relu()
                args = (stride, padding, (1, 1), False, (0, 0), groups)
                part = torch.ops.torchtp.convolution(part, weight, None, *args, *lists).relu()
            whole.square().sum().backward()
            part.square().sum().backward()
            assert_same(part.detach(), cut.shard(whole).detach(), (cut, layout), 1e-5)
            assert_same(first.grad, cut.shard(x.grad), (cut, layout), 1e-5)


def test_stacked_convolutions_match_in_fp32():
    run_ranks(stack, 4)


def adjoints(seed, count):
    import torchtp  # noqa: F401

    rng = random.Random(seed)
    torch.manual_seed(seed)
    rank, size = dist.get_rank(), dist.get_world_size()
    own = torch.Generator().manual_seed(seed + rank)  # what differs in size must not disturb what all ranks draw alike
    for case in range(count):
        extent, dim = rng.randint(1, 20), rng.choice([2, 3])
        shape = [2, 3, 5, 5]
        shape[dim] = extent
        x = torch.randn(shape, dtype=torch.float64).contiguous(memory_format=random_layout(rng, 4))
        begins = [rng.randint(-3, extent + 2) for _ in range(size)]
        ends = [begin + rng.choice([0, 2, extent]) for begin in begins]
        cut = shardings((dim,))[0]
        (group,) = cut.groups
        part = cut.shard(x).requires_grad_()
        fill = rng.choice([0.0, 7.0])
        pulled = torch.ops.torchtp.pull(part, dim, extent, begins, ends, group, fill)
        padded = torch.full([60 if d == dim else n for d, n in enumerate(shape)], fill, dtype=x.dtype)
        padded.narrow(dim, 10, extent).copy_(x)
        what = (case, shape, dim, begins, ends, fill)
        assert_same(pulled.detach(), padded.narrow(dim, begins[rank] + 10, ends[rank] - begins[rank]), what, 0)
        # <pull x, y> = <x, push_add y>, without what was filled in.
        y = torch.randn(pulled.shape, dtype=x.dtype, generator=own)
        pushed = torch.ops.torchtp.push_add(y, dim, extent, begins, ends, group)
        zero = torch.ops.torchtp.pull(part.detach(), dim, extent, begins, ends, group)
        assert_same(total((zero * y).sum()), total((part.detach() * pushed).sum()), what)
        # Each is the other's backward.
        (grad,) = torch.autograd.grad(pulled, part, y)
        assert_same(grad, pushed, what, 0)
        y.requires_grad_()
        v = torch.randn(pushed.shape, dtype=x.dtype, generator=own)
        (back,) = torch.autograd.grad(torch.ops.torchtp.push_add(y, dim, extent, begins, ends, group), y, v)
        assert_same(back, torch.ops.torchtp.pull(v, dim, extent, begins, ends, group), what, 0)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_push_add_is_the_adjoint_of_pull(size):
    run_ranks(adjoints, size, size, 60)


def large_pulls():
    """Rows long enough to be copied in pieces, by several threads."""
    import torchtp  # noqa: F401

    torch.manual_seed(0)
    rank, threads = dist.get_rank(), torch.get_num_threads()
    torch.set_num_threads(3)
    for dim, begins, ends in ((2, [-3, 500], [523, 1003]), (3, [-2, 140], [170, 302])):
        for layout in (torch.contiguous_format, torch.channels_last):
            x = torch.randn(2, 3, 1000, 300).contiguous(memory_format=layout)
            cut = shardings((dim,))[0]
            args = (dim, x.shape[dim], begins, ends, cut.groups[0])
            padded = torch.full([1020 if d == dim else n for d, n in enumerate(x.shape)], -1.0)
            padded.narrow(dim, 10, x.shape[dim]).copy_(x)
            pulled = torch.ops.torchtp.pull(cut.shard(x), *args, -1.0)
            assert torch.equal(pulled, padded.narrow(dim, begins[rank] + 10, ends[rank] - begins[rank])), (dim, layout)
            pushed = torch.ops.torchtp.push_add(pulled, *args)
            wanted = torch.zeros(x.shape[dim])
            for begin, end in zip(begins, ends, strict=True):
                wanted[max(begin, 0) : end] += 1
            shape = [-1 if d == dim else 1 for d in range(4)]
            assert torch.equal(pushed, cut.shard(x * wanted.view(shape))), (dim, layout)
    torch.set_num_threads(threads)


def test_large_pulls_move_the_same_bits():
    run_ranks(large_pulls, 2)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.bfloat16, torch.complex64])
def test_pull_fills_in_every_dtype(dtype):
    run_ranks(filled_pulls, 2, dtype)


def filled_pulls(dtype):
    import torchtp  # noqa: F401

    x = torch.arange(24).view(1, 2, 2, 6).to(dtype)
    cut, begin = shardings((3,))[0], 3 * dist.get_rank()
    for fill in (0.0, 1.0):
        pulled = torch.ops.torchtp.pull(cut.shard(x), 3, 6, [-1, 2], [4, 7], cut.groups[0], fill)
        padded = torch.full((1, 2, 2, 8), fill, dtype=dtype)
        padded[..., 1:7] = x
        assert torch.equal(pulled, padded[..., begin : begin + 5])


def wrong_shard():
    import torchtp  # noqa: F401

    (group,) = shardings((2,))[0].groups
    torch.ops.torchtp.pull(torch.randn(1, 1, 5, 5), 2, 12, [0, 6], [7, 12], group)


def test_a_shard_of_the_wrong_size_is_named():
    with pytest.raises(RanksFailed, match="gives rank 0 6 rows, but it has 5"):
        run_ranks(wrong_shard, 2)


def opchecks():
    import torchtp  # noqa: F401

    ops = torch.ops.torchtp
    for cut in shardings((2, 3)):
        x = torch.randn(2, 4, 9, 10, dtype=torch.float64)
        part = cut.shard(x).requires_grad_()
        weight = torch.randn(6, 4, 3, 3, dtype=x.dtype).requires_grad_()
        bias = torch.randn(6, dtype=x.dtype).requires_grad_()
        args = ([2, 2], [1, 1], [1, 1], False, [0, 0], 1)
        out = ops.convolution(part, weight, bias, *args, *cut.cut(x))
        torch.library.opcheck(ops.convolution.default, (part, weight, bias, *args, *cut.cut(x)))
        dy = torch.randn_like(out).requires_grad_()
        backward = (dy, part, weight, *args, [True] * 3, *cut.cut(x))
        torch.library.opcheck(ops.convolution_backward.default, backward)
        dims, extents, groups = cut.cut(x)
        rows = (dims[0], extents[0], [0, 4], [6, extents[0] + 1], groups[0])
        torch.library.opcheck(ops.pull.default, (part, *rows, 0.0))
        pulled = ops.pull(part.detach(), *rows).requires_grad_()
        torch.library.opcheck(ops.push_add.default, (pulled, *rows))


def test_convolution_and_pull_pass_opcheck():
    run_ranks(opchecks, 2)


X, W = torch.randn(2, 4, 5, 6), torch.randn(4, 4, 3, 3)
REFUSED = {
    "stride": ({3: [1, 0]}, r"stride must be positive, got \[1, 0\]"),
    "dilation": ({5: [0, 1]}, "dilation must be positive"),
    "padding": ({4: [0, -1]}, "padding must not be negative"),
    "output_padding": ({7: [-1, 0]}, "output_padding must not be negative"),
    "groups": ({8: 0}, "groups must be positive"),
    "number": ({3: [1, 1, 1]}, "stride needs a number for each of 2 spatial dims"),
    "kernel": ({1: W[..., :0]}, "a kernel has one tap or more"),
    "dims": ({1: W[0]}, "needs a weight of as many dims"),
    "channels": ({1: W[:, :2]}, "is for 2 channels, but the input has 4"),
    "bias": ({2: torch.ones(1)}, r"sizes of bias are \[4\] here, got \[1\]"),
    "device": ({1: W.to("meta")}, "device of weight is meta, that of the input cpu"),
}


def convolved(which):
    """The messages of forward and backward of one image and of one that is cut."""
    import torchtp  # noqa: F401

    change, messages = REFUSED[which][0], []
    for cut in (([], [], []), shardings((3,))[0].cut(X)):
        x = shardings((3,))[0].shard(X) if cut[0] else X
        for transposed in (False, True):
            args = [x, W, None, [1, 1], [1, 1], [1, 1], transposed, [0, 0], 1]
            for place, value in change.items():
                args[place] = value
            calls = [(torch.ops.torchtp.convolution, [*args, *cut])]
            if 2 not in change:
                backward = [x, *args[:2], *args[3:], [True] * 3, *cut]
                calls.append((torch.ops.torchtp.convolution_backward, backward))
            for op, arguments in calls:
                if which == "channels" and transposed:
                    continue  # it has other ones
                with pytest.raises(ValueError) as caught:
                    op(*arguments)
                messages.append(str(caught.value))
    return messages


@pytest.mark.parametrize("which", REFUSED)
def test_numbers_that_no_convolution_has_are_refused(which):
    for messages in run_ranks(convolved, 2, which):
        assert messages and all(re.search(REFUSED[which][1], text) for text in messages), messages


def wrong_gradients():
    import torchtp  # noqa: F401

    cut, filters = shardings((3,))[0], torch.randn(4, 1, 5, 5)
    part, numbers = cut.shard(X), ([1, 1], [2, 2], [1, 1], False, [0, 0], 4, [True] * 3)
    backward = torch.ops.torchtp.convolution_backward
    for grad in (part[:1], part[:, :2], part[:, :, :3], part[..., :2], part.repeat(1, 1, 1, 3)):
        with pytest.raises(ValueError, match="sizes of grad_output are"):
            backward(grad, part, filters, *numbers, *cut.cut(X))
    with pytest.raises(ValueError, match="gives rank . 3 rows, but its input has sizes"):
        backward(part, part[..., :2], filters, *numbers, *cut.cut(X))


def test_gradients_of_other_sizes_are_refused():
    run_ranks(wrong_gradients, 2)


def test_one_number_stands_for_all_dims_as_in_torch():
    import torchtp  # noqa: F401

    found = torch.ops.torchtp.convolution(X, W, None, [2], [1], [1], False, [0], 1, [], [], [])
    assert_same(found, torch.convolution(X, W, None, [2], [1], [1], False, [0], 1), "one number", 0)


def wrong_pulls():
    import torchtp  # noqa: F401

    ops, (group,) = torch.ops.torchtp, shardings((3,))[0].groups
    for device in ("cpu", "meta"):
        x = torch.randn(2, 4, 5, 3, device=device)
        for op in (ops.pull, ops.pull_start, ops.push_add):
            for dim in (-1, 4):
                with pytest.raises(ValueError, match=f"{op.__name__}: dim {dim} is not one of 0 to 3"):
                    op(x, dim, 6, [0, 3], [3, 6], group)
            with pytest.raises(ValueError, match=rf"{op.__name__}: rank 0 cannot have rows \[5, 0\)"):
                op(x, 3, 6, [5, 3], [0, 8], group)
            with pytest.raises(ValueError, match=f"{op.__name__}: extent is the global one of dim 3, not negative"):
                op(x, 3, -6, [0, 3], [3, 6], group)
    for dims, extents, groups, text in (
        ([3, 3], [6, 6], [group] * 2, "is named twice"),
        ([3], [-6], [group], "negative"),
    ):
        with pytest.raises(ValueError, match=text):
            ops.convolution(x, W.to(x), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, dims, extents, groups)


def test_dims_and_intervals_that_are_none_are_refused():
    run_ranks(wrong_pulls, 2)
