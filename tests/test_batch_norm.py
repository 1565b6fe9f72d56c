"""batch_norm cut over ranks against PyTorch's on the whole tensor."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from sharding import assert_same, layout_of, leaf, random_layout, shardings, total

from torchtp.testing import run_ranks


def norms(seed, count):
    import torchtp  # noqa: F401

    rng = random.Random(seed)
    torch.manual_seed(seed)
    for case in range(count):
        dims = rng.randint(1, 3)
        extents = [rng.randint(1, (40, 30, 7)[dims - 1]) for _ in range(dims)]
        batch, channels = rng.randint(2, 3), rng.choice([1, 5, 70])
        training, affine, tracked = rng.random() < 0.7, rng.random() < 0.8, rng.random() < 0.8
        tracked |= not training
        momentum, eps = rng.choice([0.1, 0.5]), rng.choice([1e-5, 1e-3])
        cut = rng.choice(shardings(range(2, 2 + dims), data=True))
        x = 3 + 2 * torch.randn(batch, channels, *extents, dtype=torch.float64)
        x = x.contiguous(memory_format=random_layout(rng, x.dim())).requires_grad_()
        weight, bias = (leaf(torch.randn(channels, dtype=x.dtype)) if affine else None for _ in range(2))
        running = [torch.rand(channels, dtype=x.dtype) + 0.5 if tracked else None for _ in range(2)]
        parts = [None if r is None else r.clone() for r in running]
        what = (case, tuple(x.shape), training, affine, tracked, cut, layout_of(x))

        y = F.batch_norm(x, *running, weight, bias, training, momentum, eps)
        part, w, b = cut.shard(x), leaf(weight), leaf(bias)
        groups = cut.groups
        out, mean, invstd = torch.ops.torchtp.batch_norm(part, w, b, *parts, training, momentum, eps, groups)
        assert_same(out.detach(), cut.shard(y).detach(), what)
        for mine, theirs in zip(parts, running, strict=True):
            if mine is not None:
                assert_same(mine, theirs, (what, "running"))
        assert mean.shape == invstd.shape == ((channels,) if training else (0,))

        dy = torch.randn_like(y).requires_grad_()
        if rng.random() < 0.2:
            dy = torch.randn((), dtype=y.dtype).expand(y.shape).requires_grad_()  # its dx and dw are zero but for noise
        dout = cut.shard(dy)
        params, own = ([x, weight, bias], [part, w, b]) if affine else ([x], [part])
        grads = torch.autograd.grad(y, params, dy, create_graph=True)
        mine = torch.autograd.grad(out, own, dout, create_graph=True)
        assert_same(mine[0].detach(), cut.shard(grads[0]).detach(), (what, "dx"), 1e-8)
        for share, whole in zip(mine[1:], grads[1:], strict=True):
            assert_same(total(share), whole.detach(), (what, "dw, db"), 1e-8)

        v = [torch.randn_like(g) for g in grads]
        second = [dy, x, weight] if affine else [dy, x]
        second_own = [dout, part, w] if affine else [dout, part]
        for use in ([0], [0, 1, 2]) if affine else ([0],):
            theirs = torch.autograd.grad(
                [grads[i] for i in use], second, [v[i] for i in use], allow_unused=True, retain_graph=True
            )
            mine_v = [cut.shard(v[0]), *v[1:]]
            ours = torch.autograd.grad(
                [mine[i] for i in use], second_own, [mine_v[i] for i in use], allow_unused=True, retain_graph=True
            )
            for i, (a, e) in enumerate(zip(ours, theirs, strict=True)):
                if e is None or a is None:
                    assert all(t is None or not (t.abs() > 1e-12).any() for t in (a, e)), (what, "second", i, use)
                else:
                    assert_same(*((total(a), e) if i == 2 else (a, cut.shard(e))), (what, "second", i, use), 1e-8)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_batch_norm_matches_the_whole(size):
    run_ranks(norms, size, size, 40)


def training_dtypes():
    import torchtp  # noqa: F401

    cut = shardings((2, 3))[-1]
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)):
        for layout in (torch.contiguous_format, torch.channels_last):
            # A mean far from 0: sums of squares would cancel.
            x = (100 + torch.randn(2, 24, 70, 65)).to(dtype).contiguous(memory_format=layout)
            weight, bias = torch.rand(24) + 0.5, torch.randn(24)
            wide = x.double().requires_grad_()
            y = F.batch_norm(wide, None, None, weight.double(), bias.double(), True)
            dy = torch.randn_like(y).to(dtype)
            y.backward(dy.double())
            part = cut.shard(x).requires_grad_()
            out, _, _ = torch.ops.torchtp.batch_norm(part, weight, bias, None, None, True, 0.1, 1e-5, cut.groups)
            assert out.dtype == dtype and layout_of(out) == layout
            out.backward(cut.shard(dy))
            assert_same(out.double(), cut.shard(y), (dtype, layout), tolerance)
            assert_same(part.grad.double(), cut.shard(wide.grad), (dtype, layout), tolerance)


def test_batch_norm_is_accurate_in_the_dtypes_of_training():
    run_ranks(training_dtypes, 4)


def opchecks():
    import torchtp  # noqa: F401

    cut = shardings((2,))[0]
    part = cut.shard(torch.randn(2, 3, 5, 4)).requires_grad_()
    weight = torch.rand(3).requires_grad_()
    args = (part, weight, weight.detach().clone().requires_grad_(), torch.zeros(3), torch.ones(3))
    for training in (True, False):
        torch.library.opcheck(torch.ops.torchtp.batch_norm.default, (*args, training, 0.1, 1e-5, cut.groups))
    _, mean, invstd = torch.ops.torchtp.batch_norm(*args, True, 0.1, 1e-5, cut.groups)
    part, weight = part.detach(), weight.detach()
    backward = (torch.randn_like(part), part, weight, None, None, mean, invstd, True, 1e-5, [True] * 3, cut.groups)
    torch.library.opcheck(torch.ops.torchtp.batch_norm_backward.default, backward)


def test_batch_norm_passes_opcheck():
    run_ranks(opchecks, 2)


X, ROW = torch.randn(2, 8, 4, 4), torch.ones(8)


@pytest.mark.parametrize(
    ("name", "value"), [("weight", ROW[:2]), ("bias", ROW[:2]), ("running_mean", ROW[:2]), ("running_var", ROW[:1])]
)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_rows_of_other_sizes_are_refused(name, value, training, device):
    import torchtp  # noqa: F401

    rows = {"weight": ROW, "bias": ROW, "running_mean": ROW, "running_var": ROW, name: value}
    args = [X.to(device), *(row.to(device, copy=True) for row in rows.values()), training, 0.1, 1e-5, []]
    with pytest.raises(ValueError, match=f"batch_norm: {name} has one number for each of 8 channels, got"):
        torch.ops.torchtp.batch_norm(*args)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: X[:, :, :2]}, "sizes of grad_output are"),
        ({2: ROW[:2]}, "weight has one number"),
        ({5: ROW[:2]}, "save_mean has one number for each of 8"),
        ({6: torch.ones(0)}, "save_invstd has one number for each of 8"),
        ({6: torch.ones(8, device="meta")}, "device of save_invstd is meta"),
        ({7: False}, "without training it needs running_mean"),
        ({3: ROW[:2], 4: ROW, 7: False}, "running_mean has one number for each of 8"),
    ],
)
def test_what_does_not_fit_in_backward_is_refused(change, message):
    import torchtp  # noqa: F401

    args = [X, X, None, None, None, ROW, ROW, True, 1e-5, [True] * 3, []]
    for place, value in change.items():
        args[place] = value
    with pytest.raises(ValueError, match=f"batch_norm_backward: .*{message}"):
        torch.ops.torchtp.batch_norm_backward(*args)
