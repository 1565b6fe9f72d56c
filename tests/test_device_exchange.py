"""Halos of a device's tensors, by every way they can travel, against those of the CPU's exchange; here on CPU tensors.

tests/test_cuda_exchange.py runs the same on a card.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from torchtp import _C
from torchtp.testing import run_ranks

OPS = torch.ops.torchtp
KINDS = {"peer_memory": "torchtp", "staged": "torchtp", "grouped": "gloo"}
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.uint8, torch.complex64]


@contextmanager
def travelling(kind: str, backend: str | None = None):
    """A group of all ranks whose halos travel as `kind`, and one whose halos the CPU's exchange moves."""
    group, plain = dist.new_group(backend=backend), dist.new_group()
    try:
        if kind != "auto":
            _C.set_exchange(group.group_name, kind)
        yield group.group_name, plain.group_name
    finally:
        dist.barrier(plain)
        dist.destroy_process_group(group)
        dist.destroy_process_group(plain)


def _full(rng: random.Random, dtype: torch.dtype, dims: int = 4) -> Tensor:
    extents = [rng.choice([1, 2]), rng.choice([1, 3, 16]), *(rng.randint(1, 19) for _ in range(dims - 2))]
    full = torch.randint(0, 100, extents, generator=torch.Generator().manual_seed(rng.randrange(1 << 30))).to(dtype)
    last = torch.channels_last if dims == 4 else torch.channels_last_3d
    return full.contiguous(memory_format=rng.choice([torch.contiguous_format, last]))


def _part(full: Tensor, dim: int) -> Tensor:
    begin, end = _C.owned(full.shape[dim], dist.get_world_size(), dist.get_rank())
    last = torch.channels_last if full.dim() == 4 else torch.channels_last_3d
    layout = torch.contiguous_format if full.is_contiguous() else last
    return full.narrow(dim, begin, end - begin).clone(memory_format=layout)


def _wanted(rng: random.Random, extent: int, reach: int) -> tuple[list[int], list[int]]:
    size = dist.get_world_size()
    begins = [_C.owned(extent, size, rank)[0] - rng.randint(-2, reach) for rank in range(size)]
    return begins, [begin + rng.choice([0, 1, 3, extent]) for begin in begins]


def pulls(kind: str, device: str, seed: int, count: int, backend: str | None = None) -> list[str]:
    """Random pulls, their adjoints and halos that stay where they arrive: the same bits as by the CPU's exchange."""
    rng = random.Random(seed)
    with travelling(kind, backend) as (group, plain):
        for case in range(count):
            full = _full(rng, rng.choice(DTYPES), rng.choice([4, 4, 5]))
            dim = rng.randrange(full.dim())
            extent = full.shape[dim]
            begins, ends = _wanted(rng, extent, rng.choice([1, 4, extent]))
            part = _part(full, dim)
            if rng.random() < 0.2 and dim > 1 and dist.get_rank() == 0:  # ranks need not agree on the layout
                part = part.contiguous() if not part.is_contiguous() else part
            there = part.to(device)
            fill = rng.choice([0.0, 3.0])
            what = (case, tuple(full.shape), full.dtype, dim, begins, ends)
            expected = OPS.pull(part, dim, extent, begins, ends, plain, fill)
            found = OPS.pull(there, dim, extent, begins, ends, group, fill)
            assert torch.equal(found.cpu(), expected), ("pull", *what)
            back = OPS.push_add(expected, dim, extent, begins, ends, plain)
            found = OPS.push_add(expected.to(device), dim, extent, begins, ends, group)
            assert torch.equal(found.cpu(), back), ("push_add", *what)
        _C.check_exchanges(group)
        return [made["kind"] for made in _C.device_exchanges(group)]


def halos(kind: str, device: str, seed: int, count: int) -> None:
    """Halos beside own rows, those of a stack with its corners too."""
    rng = random.Random(seed)
    with travelling(kind) as (group, plain):
        for case in range(count):
            full = _full(rng, rng.choice(DTYPES))
            full = full.expand(2, *full.shape[1:]).contiguous(
                memory_format=torch.contiguous_format if full.is_contiguous() else torch.channels_last
            )
            part = _part(full, 3)
            begins, ends = _wanted(rng, full.shape[3], 4)
            heights = [height for height in (rng.randint(0, 2), part.shape[2], rng.randint(0, 2)) if height]
            stack = [torch.cat([part] * height, 2)[:, :, :height].contiguous() for height in heights]
            if not part.is_contiguous():
                stack = [piece.contiguous(memory_format=torch.channels_last) for piece in stack]
            args = (2, 3, full.shape[3], begins, ends)
            expected = _C.pull_halos(stack, *args, plain)
            found = _C.pull_halos([piece.to(device) for piece in stack], *args, group)
            for mine, theirs in zip(found, expected, strict=True):
                assert torch.equal(mine.cpu(), theirs), (case, tuple(full.shape), full.dtype, begins, ends)
        _C.check_exchanges(group)


def narrow_halos(kind: str, device: str) -> None:
    """Of own parts of one pixel, or none: they are in both layouts, their neighbours' parts and the halos are not."""
    with travelling(kind) as (group, plain):
        for width, rows in ((3, [1]), (5, [1, 1]), (5, [1, 1, 1]), (7, [1, 1])):
            full = torch.arange(24.0 * width).reshape(2, 4, 3, width).contiguous(memory_format=torch.channels_last)
            stack = [_part(full[:, :, i : i + 1], 3) for i in range(len(rows))]
            for begins, ends in (([-2] * 3, [width + 2] * 3), ([0, 1, 2], [width, width - 1, width])):
                args = (2, 3, width, begins, ends)
                expected = _C.pull_halos(stack, *args, plain)
                found = _C.pull_halos([piece.to(device) for piece in stack], *args, group)
                for mine, theirs in zip(found, expected, strict=True):
                    assert torch.equal(mine.cpu(), theirs), (width, rows, begins, ends)
        _C.check_exchanges(group)


def large_parts(kind: str, device: str) -> None:
    """Messages that do not fit into the arena at once, in both directions and in one."""
    with travelling(kind) as (group, plain):
        for begins, ends in (([0, 10], [90, 100]), ([0, 0], [50, 100]), ([0, 50], [100, 60])):
            for dtype, extents in ((torch.float32, (2, 3, 100, 700)), (torch.uint8, (7, 3, 100, 4001))):
                full = torch.arange(torch.Size(extents).numel()).remainder(251).to(dtype).reshape(extents)
                part = _part(full, 2)
                args = (2, 100, begins, ends)
                found = OPS.pull(part.to(device), *args, group)
                assert torch.equal(found.cpu(), OPS.pull(part, *args, plain))
                found = OPS.push_add(found, *args, group)
                assert torch.equal(found.cpu(), OPS.push_add(OPS.pull(part, *args, plain), *args, plain))


def trained(kind: str, device: str, backend: str | None = None) -> None:
    """Forward and backward of a stack of convolutions by the group, against the CPU's exchange."""
    torch.manual_seed(0)
    x = torch.randn(2, 4, 9, 21, dtype=torch.float64)
    weights = [torch.randn(4, 4, 5, 5, dtype=torch.float64) / 10 for _ in range(3)]

    def run(group: str, where: str) -> list[Tensor]:
        leaves = [_part(x, 3).to(where).requires_grad_(), *(w.to(where).requires_grad_() for w in weights)]
        y = leaves[0]
        for weight in leaves[1:]:
            y = OPS.convolution(y, weight, None, [1, 1], [2, 2], [1, 1], False, [0, 0], 1, [3], [21], [group]).sin()
        grads = torch.autograd.grad(y.square().sum(), leaves)
        return [y.detach().cpu(), *(grad.cpu() for grad in grads)]

    with travelling(kind, backend) as (group, plain):
        for _ in range(3):
            for found, expected in zip(run(group, device), run(plain, "cpu"), strict=True):
                torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def several_groups(kind: str, device: str) -> None:
    """Two groups in turns, one inside the other's pull."""
    with travelling(kind) as (first, plain), travelling(kind) as (second, _):
        full = torch.arange(60.0).reshape(1, 2, 3, 10)
        part, args = _part(full, 3), (3, 10, [-1, 3], [7, 11])
        expected = OPS.pull(part, *args, plain)
        for _ in range(5):
            early, ticket = OPS.pull_start(part.to(device), *args, first)
            inner, inner_ticket = OPS.pull_start(part.to(device) * 2, *args, second)
            late, late_ticket = OPS.pull_start(part.to(device) * 3, *args, first)
            OPS.pull_finish(late, late_ticket, first)
            OPS.pull_finish(inner, inner_ticket, second)
            OPS.pull_finish(early, ticket, first)
            assert torch.equal(early.cpu(), expected)
            assert torch.equal(inner.cpu(), expected * 2)
            assert torch.equal(late.cpu(), expected * 3)


def on_ranks(size: int, body: Callable[..., Any], *args: Any, backend: str = "torchtp") -> list[Any]:
    return run_ranks(body, size, *args, backend=backend)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_pulls_bring_the_same_bits(kind, size):
    assert on_ranks(size, pulls, kind, "cpu", size, 40, backend=KINDS[kind])[0] == [kind]


@pytest.mark.parametrize("kind", KINDS)
def test_halos_are_the_same(kind):
    on_ranks(3, halos, kind, "cpu", 3, 25, backend=KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_halos_beside_one_pixel_are_the_same(kind):
    on_ranks(3, narrow_halos, kind, "cpu", backend=KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_parts_larger_than_an_arena_arrive(kind):
    on_ranks(2, large_parts, kind, "cpu", backend=KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_the_same(kind):
    on_ranks(3, trained, kind, "cpu", backend=KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_pulls_of_several_groups_may_overlap(kind):
    on_ranks(2, several_groups, kind, "cpu", backend=KINDS[kind])


def _without_memory(group_kind: str) -> str:
    with travelling(group_kind) as (group, _), pytest.raises(RuntimeError) as caught:
        OPS.pull(torch.ones(1, 1, 1, 2), 3, 4, [0, 1], [3, 4], group)
    return str(caught.value)


def test_ranks_without_common_memory_are_told():
    for message in on_ranks(2, _without_memory, "peer_memory", backend="gloo"):
        assert "share no memory" in message


def _other_memory(size_of_1: str) -> str:
    os.environ["TORCHTP_ARENA_BYTES"] = str(1 << 20) if dist.get_rank() != 1 else size_of_1
    with travelling("peer_memory") as (group, _), pytest.raises(RuntimeError) as caught:
        OPS.pull(torch.ones(1, 1, 1, 2), 3, 6, [0, 1, 3], [3, 5, 6], group)
    return str(caught.value)


@pytest.mark.parametrize(
    ("size_of_1", "message"),
    [
        (str(1 << 16), "must be the same on all ranks: rank 0 has memory of 1048576 bytes for halos, rank 1 of 65536"),
        (str(1 << 50), "rank 1 has no memory for halos: "),
        ("many", "rank 1 has no memory for halos: TORCHTP_ARENA_BYTES is a number of bytes, not many"),
    ],
)
def test_memory_for_halos_is_alike(size_of_1, message):
    for told in run_ranks(_other_memory, 3, size_of_1, backend="torchtp", fresh=True):
        assert message in told


def _rank(**facts: Any) -> dict[str, Any]:
    return {"host": "a", "seen": ["0", "1"], "reachable": ["0", "1"], "symmetric_memory": True, **facts}


@pytest.mark.parametrize(
    ("ranks", "kind", "why"),
    [
        ([_rank(device="0"), _rank(device="1")], "peer_memory", ""),
        ([_rank(device="0"), _rank(device="0")], "staged", "ranks 0 and 1 share a device"),
        ([_rank(device="0", shares_devices=True)] * 2, "peer_memory", ""),
        ([_rank(device="0", grouped=True)] * 2, "staged", "share a device; ranks 0 and 1 share a device"),
        ([_rank(device="0", grouped=True), _rank(device="1", grouped=True, host="b")], "grouped", "different hosts"),
        ([_rank(device="0"), _rank(device="1", host="b")], "staged", "does not move tensors of its device"),
        ([_rank(device="0", reachable=[], grouped=True), _rank(device="1", grouped=True)], "grouped", "cannot reach"),
        ([_rank(device="0", seen=["0"], reachable=[]), _rank(device="1", seen=["1"], reachable=[])], "peer_memory", ""),
        ([_rank(device="0", symmetric_memory=False), _rank(device="1")], "staged", "no symmetric memory for rank 0"),
        ([_rank(device="0", wish="staged"), _rank(device="1", wish="staged")], "staged", "chosen"),
    ],
)
def test_the_best_that_all_devices_can_do_is_chosen(ranks, kind, why):
    found, reason = _C.choose_device_exchange(ranks)
    assert found == kind and why in reason and (reason == "") == (why == "")


def test_a_wish_that_cannot_be_fulfilled_is_an_error():
    with pytest.raises(RuntimeError, match="cannot travel by grouped: rank 0's process group"):
        _C.choose_device_exchange([_rank(device="0", wish="grouped"), _rank(device="1", wish="grouped")])
    with pytest.raises(RuntimeError, match="staged on rank 0 and auto on rank 1"):
        _C.choose_device_exchange([_rank(device="0", wish="staged"), _rank(device="1")])
