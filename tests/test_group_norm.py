"""group_norm (instance and layer norm too) cut over ranks, and layer_norm_channels_first, against PyTorch's."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from sharding import Sharding, assert_same, layout_of, leaf, random_layout, shardings, total

from torchtp.testing import run_ranks


def compare(y, out, whole, own, cut, what):
    """Output, gradients and double backward; whole and own are [x, w, b] or [x]."""
    assert_same(out.detach(), cut.shard(y).detach(), what)
    dy = torch.randn(y.shape, dtype=y.dtype, requires_grad=True)
    dout = cut.shard(dy)
    grads = torch.autograd.grad(y, whole, dy, create_graph=True)
    mine = torch.autograd.grad(out, own, dout, create_graph=True)
    assert_same(mine[0].detach(), cut.shard(grads[0]).detach(), (what, "dx"), 1e-9)
    for share, full in zip(mine[1:], grads[1:], strict=True):
        assert_same(total(share), full.detach(), (what, "dw, db"), 1e-9)
    v = [torch.randn_like(g) for g in grads]
    theirs = torch.autograd.grad(grads, [dy, *whole[:2]], v)
    ours = torch.autograd.grad(mine, [dout, *own[:2]], [cut.shard(v[0]), *v[1:]])
    for i, (a, e) in enumerate(zip(ours, theirs, strict=True)):
        assert_same(*((total(a), e) if i == 2 else (a, cut.shard(e))), (what, "second", i), 1e-8)


def group_norms(seed, count):
    import torchtp  # noqa: F401

    rng = random.Random(seed)
    torch.manual_seed(seed)
    for case in range(count):
        dims = rng.randint(1, 3)
        extents = [rng.randint(1, (40, 20, 7)[dims - 1]) for _ in range(dims)]
        groups, each = rng.randint(1, 4), rng.choice([1, 2, 5])
        if each * torch.Size(extents).numel() < 3:
            continue  # nothing to norm over
        channels, eps = groups * each, rng.choice([1e-5, 1e-3])
        cut = rng.choice(shardings(range(2, 2 + dims)))
        x = 3 + 2 * torch.randn(2, channels, *extents, dtype=torch.float64)
        x = x.contiguous(memory_format=random_layout(rng, x.dim())).requires_grad_()
        affine = rng.random() < 0.8
        weight, bias = (leaf(torch.randn(channels, dtype=x.dtype)) if affine else None for _ in range(2))
        what = (case, tuple(x.shape), groups, affine, cut, layout_of(x))
        y = F.group_norm(x, groups, weight, bias, eps)
        part, w, b = cut.shard(x), leaf(weight), leaf(bias)
        out, mean, rstd = torch.ops.torchtp.group_norm(part, w, b, groups, eps, cut.groups)
        _, all_mean, all_rstd = torch.native_group_norm(x, None, None, 2, channels, x[0, 0].numel(), groups, eps)
        assert_same(mean, all_mean.detach(), what)
        assert_same(rstd, all_rstd.detach(), what)
        compare(y, out, [x, weight, bias] if affine else [x], [part, w, b] if affine else [part], cut, what)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_group_norm_matches_the_whole(size):
    run_ranks(group_norms, size, size, 30)


def layer_norm(x, weight, bias, eps):
    return F.layer_norm(x.movedim(1, -1), x.shape[1:2], weight, bias, eps).movedim(-1, 1)


def layer_norms(seed, count):
    import torchtp  # noqa: F401

    rng = random.Random(seed)
    torch.manual_seed(seed)
    here = Sharding((1,), ())  # a local op: nothing is cut
    for case in range(count):
        extents = [rng.choice([0, 1, 5, 40, 70]) for _ in range(rng.randint(1, 2))]
        channels, eps = rng.choice([3, 96, 300]), rng.choice([1e-5, 1e-3])
        x = 3 + 2 * torch.randn(2, channels, *extents, dtype=torch.float64)
        x = x.contiguous(memory_format=random_layout(rng, x.dim())).requires_grad_()
        affine = rng.random() < 0.8
        weight, bias = (leaf(torch.randn(channels, dtype=x.dtype)) if affine else None for _ in range(2))
        what = (case, tuple(x.shape), affine, layout_of(x))
        y = layer_norm(x, weight, bias, eps)
        part, w, b = leaf(x), leaf(weight), leaf(bias)
        out, _, _ = torch.ops.torchtp.layer_norm_channels_first(part, w, b, eps)
        assert x.numel() == 0 or layout_of(out) == layout_of(x)
        compare(y, out, [x, weight, bias] if affine else [x], [part, w, b] if affine else [part], here, what)


def test_layer_norm_over_channels_matches_the_permuted_one():
    run_ranks(layer_norms, 1, 1, 30)


def training_dtypes():
    import torchtp  # noqa: F401

    cut = shardings((2, 3))[-1]
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)):
        for layout in (torch.contiguous_format, torch.channels_last):
            # A mean far from 0: sums of squares would cancel.
            x = (50 + torch.randn(2, 24, 70, 65)).to(dtype).contiguous(memory_format=layout)
            weight, bias = torch.rand(24) + 0.5, torch.randn(24)
            for op, whole in (
                (
                    lambda t, w, b: torch.ops.torchtp.group_norm(t, w, b, 4, 1e-5, cut.groups)[0],
                    lambda t, w, b: F.group_norm(t, 4, w, b),
                ),
                (
                    lambda t, w, b: torch.ops.torchtp.layer_norm_channels_first(t, w, b, 1e-5)[0],
                    lambda t, w, b: layer_norm(t, w, b, 1e-5),
                ),
            ):
                wide, *factors = (t.detach().double().requires_grad_() for t in (x, weight, bias))
                y = whole(wide, *factors)
                dy = torch.randn_like(y).to(dtype)
                y.backward(dy.double())
                part = cut.shard(x).requires_grad_()
                mine = [t.clone().requires_grad_() for t in (weight, bias)]
                out = op(part, *mine)
                assert out.dtype == dtype and layout_of(out) == layout
                out.backward(cut.shard(dy))
                assert_same(out.double(), cut.shard(y), (dtype, layout), tolerance)
                assert_same(part.grad.double(), cut.shard(wide.grad), (dtype, layout), tolerance)
                for found, factor in zip(mine, factors, strict=True):
                    assert_same(total(found.grad.double()), factor.grad, (dtype, layout), 1e-4)


def test_norms_are_accurate_in_the_dtypes_of_training():
    run_ranks(training_dtypes, 4)


def opchecks():
    import torchtp  # noqa: F401

    cut = shardings((2,))[0]
    part = cut.shard(torch.randn(2, 4, 5, 4)).requires_grad_()
    weight, bias = torch.rand(4).requires_grad_(), torch.rand(4).requires_grad_()
    ops = torch.ops.torchtp
    torch.library.opcheck(ops.group_norm.default, (part, weight, bias, 2, 1e-5, cut.groups))
    torch.library.opcheck(ops.layer_norm_channels_first.default, (part, weight, bias, 1e-5))
    part, weight, bias = part.detach(), weight.detach(), bias.detach()
    _, mean, rstd = ops.group_norm(part, weight, bias, 2, 1e-5, cut.groups)
    backward = (torch.randn_like(part), part, weight, mean, rstd, 2, [True] * 3, cut.groups)
    torch.library.opcheck(ops.group_norm_backward.default, backward)
    _, mean, rstd = ops.layer_norm_channels_first(part, weight, bias, 1e-5)
    backward = (torch.randn_like(part), part, weight, mean, rstd, [True] * 3)
    torch.library.opcheck(ops.layer_norm_channels_first_backward.default, backward)


def test_norms_pass_opcheck():
    run_ranks(opchecks, 2)


X, ROW = torch.randn(2, 8, 4, 4), torch.ones(8)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_rows_of_other_sizes_are_refused(layout, device):
    import torchtp

    x, row = X.to(device).contiguous(memory_format=layout), ROW.to(device)
    for place, name in enumerate(("weight", "bias")):
        for short in (row[:3], row.view(1, 8), torch.ones(16, device=device)):
            rows = [short if i == place else row for i in range(2)]
            with pytest.raises(ValueError, match=f"group_norm: {name} has one number for each of 8 channels"):
                torch.ops.torchtp.group_norm(x, *rows, 2, 1e-5, [])
            with pytest.raises(ValueError, match=f"layer_norm_channels_first: {name} has one number for each of 8"):
                torch.ops.torchtp.layer_norm_channels_first(x, *rows, 1e-5)
    with pytest.raises(ValueError, match=r"weight has one number for each of 8 channels, got \[3\]"):
        torchtp.nn.LayerNorm2d(3).to(device)(x)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: X[:, :, :2]}, "sizes of grad_output are"),
        ({2: ROW[:2]}, "weight has one number for each of 8"),
        ({3: torch.ones(2)}, "sizes of mean are"),
        ({4: torch.ones(1)}, "sizes of rstd are"),
    ],
)
def test_what_does_not_fit_in_backward_is_refused(change, message):
    import torchtp  # noqa: F401

    ops, groups, rows = torch.ops.torchtp, torch.ones(2, 2), torch.ones(2, 4, 4)
    for op, args in (
        (ops.group_norm_backward, [X, X, None, groups, groups, 2, [True] * 3, []]),
        (ops.layer_norm_channels_first_backward, [X, X, None, rows, rows, [True] * 3]),
    ):
        for place, value in change.items():
            args[place] = value
        with pytest.raises(ValueError, match=f"{op.__name__}: .*{message}"):
            op(*args)
