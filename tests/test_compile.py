"""Compiled graphs keep every exchange, in order."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import make_layout
from sharding import assert_same, shardings
from torch import nn

from torchtp.testing import run_ranks


def pulls_nobody_uses(backend):
    """Extent 4 over 3 ranks: the last shard is empty, rank 0 needs nothing of the first pull, but owns what others do."""
    import torchtp  # noqa: F401

    rank = dist.get_rank()
    (group,) = shardings((2,))[0].groups
    x = torch.arange(4.0).view(1, 1, 4, 1)
    part = shardings((2,))[0].shard(x.requires_grad_())

    @torch.compile(fullgraph=True, backend=backend)
    def halo(part):
        early = torch.ops.torchtp.pull(part.detach(), 2, 4, [0, 1, 0], [3, 4, 4], group)
        wide = torch.ops.torchtp.pull(part * 2, 2, 4, [-1, 1, 4], [3, 5, 4], group)
        out = torch.ops.torchtp.push_add(wide.square(), 2, 4, [-1, 1, 4], [3, 5, 4], group)
        return (out, early) if rank > 0 else (out, None)

    for _ in range(2):
        out, early = halo(part)
        (grad,) = torch.autograd.grad(out.sum(), part)
    if rank > 0:
        assert_same(early, x.detach()[:, :, 1 if rank == 1 else 0 :], rank, 0)
    counts = torch.tensor([1.0, 2, 2, 1]).view_as(x)
    cut = shardings((2,))[0]
    assert_same(out.detach(), cut.shard(counts * 4 * x.detach() ** 2), rank, 1e-6)
    assert_same(grad, cut.shard(counts * 8 * x.detach()), rank, 1e-6)


@pytest.mark.parametrize("backend", ["aot_eager"])
def test_a_pull_nobody_uses_is_not_dropped(backend):
    run_ranks(pulls_nobody_uses, 3, backend, timeout=180)


def layers_nobody_uses():
    import torchtp  # noqa: F401

    rank = dist.get_rank()
    (group,) = shardings((2,))[0].groups
    filters, window = torch.ones(4, 1, 3, 3), [[1, 1]] * 3

    @torch.compile(fullgraph=True, backend="aot_eager")
    def layer(part):
        cut = ([2], [8], [group])
        out = torch.ops.torchtp.depthwise_layer_norm(part, filters, None, None, None, 1e-5, False, *window, *cut)[0]
        return out if rank > 0 else part * 2

    layer(torch.rand(1, 4, 4, 8))
    dist.barrier()


def test_a_depthwise_layer_norm_nobody_uses_is_not_dropped():
    run_ranks(layers_nobody_uses, 2, timeout=180)


def small_network():
    import torchtp  # noqa: F401

    for cut in shardings((2, 3)):
        x = torch.randn(2, 3, 16, 13, dtype=torch.float64)
        weight = torch.randn(4, 3, 3, 3, dtype=torch.float64).requires_grad_()
        lists = cut.cut(x)

        @torch.compile(fullgraph=True, backend="aot_eager")
        def network(part, weight, running_mean, running_var, lists=lists, groups=cut.groups):
            ops = torch.ops.torchtp
            y = ops.convolution(part, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, *lists)
            y, _, _ = ops.batch_norm(y, None, None, running_mean, running_var, True, 0.1, 1e-5, groups)
            return ops.max_pool(y.relu(), [3, 3], [2, 2], [1, 1], [1, 1], False, *lists)[0]

        running = [torch.zeros(4, dtype=x.dtype), torch.ones(4, dtype=x.dtype)]
        part = cut.shard(x).requires_grad_()
        out = network(part, weight, *running)
        out.square().sum().backward()
        x.requires_grad_()
        whole = [torch.zeros(4, dtype=x.dtype), torch.ones(4, dtype=x.dtype)]
        y = F.max_pool2d(F.batch_norm(F.conv2d(x, weight, padding=1), *whole, training=True).relu(), 3, 2, 1)
        y.square().sum().backward()
        assert_same(out.detach(), cut.shard(y).detach(), cut)
        assert_same(part.grad, cut.shard(x.grad), cut)
        for mine, theirs in zip(running, whole, strict=True):
            assert_same(mine, theirs, cut)


def test_a_compiled_network_matches_the_whole():
    run_ranks(small_network, 2, timeout=180)


def converted():
    import torchtp

    torch.manual_seed(0)
    single = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.Upsample(scale_factor=2)
    )
    model = torchtp.nn.convert(copy.deepcopy(single.double()), layout := make_layout({"w": 2}))
    x = torch.randn(2, 3, 8, 9, dtype=torch.float64)
    expected = single(x)
    whole = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")(x)
    assert_same(whole, expected, "a plain tensor, in one graph")
    cut = torch.compile(model, backend="aot_eager")(layout.shard(x))
    assert_same(cut.full_tensor(), expected, "a cut one, eagerly")


def test_a_converted_network_compiles_for_plain_tensors_and_takes_cut_ones():
    run_ranks(converted, 2, timeout=180, fresh=True)


def compiled_loss():
    layout = make_layout({"w": 2})
    x, target = (torch.randn(2, 3, 8, 9, generator=torch.Generator().manual_seed(i)).double() for i in (1, 2))

    @torch.compile(backend="eager")
    def criterion(output, target):
        return F.mse_loss(output, layout.shard(target)) + layout.full(output).mean()

    mine = layout.shard(x).requires_grad_()
    criterion(mine.sin(), target).backward()
    x.requires_grad_()
    (F.mse_loss(x.sin(), target) + x.sin().mean()).backward()
    assert_same(mine.grad.full_tensor(), x.grad, "the gradient")


def test_a_compiled_loss_cuts_its_target():
    run_ranks(compiled_loss, 2, timeout=180, fresh=True)
