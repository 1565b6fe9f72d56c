"""The integers behind every pull, against brute force: no tensors, no ranks."""

from __future__ import annotations

import random

import pytest
import torch

from torchtp import _C


def geometries(seed, count):
    rng = random.Random(seed)
    for _ in range(count):
        kernel, stride, padding, dilation = rng.randint(1, 8), rng.randint(1, 5), rng.randint(0, 9), rng.randint(1, 3)
        yield rng, rng.randint(1, 40), (kernel, stride, padding, dilation)


def taps(output, kernel, stride, padding, dilation):
    return [stride * output - padding + dilation * k for k in range(kernel)]


def test_owned_is_the_rule_of_chunk():
    for extent in range(40):
        for shards in range(1, 9):
            chunks = [list(c) for c in torch.arange(extent).chunk(shards)] if extent else []
            for shard in range(shards):
                begin, end = _C.owned(extent, shards, shard)
                assert list(range(begin, end)) == (chunks[shard] if shard < len(chunks) else [])


def test_output_extent_counts_the_windows_that_fit():
    for _, extent, window in geometries(1, 4000):
        kernel, stride, padding, _ = window
        last = extent + padding - 1
        fits = [o for o in range(extent + 2 * padding) if taps(o, *window)[-1] <= last]
        assert _C.output_extent(extent, *window) == len(fits)
        if 2 * padding > kernel:
            continue  # pooling refuses those
        # ceil_mode: a last window may overhang, but not start in the right padding.
        starts = [o for o in range(extent + 2 * padding) if stride * o - padding < extent]
        overhang = [o for o in starts if taps(o - 1, *window)[-1] < last]
        assert _C.output_extent(extent, *window, ceil_mode=True) == len(overhang)


def test_transposed_extent_undoes_output_extent():
    for rng, extent, window in geometries(2, 4000):
        _, stride, _, dilation = window
        output_padding = rng.randint(0, max(stride, dilation) - 1)
        whole = _C.transposed_extent(extent, *window, output_padding)
        if whole > 0 and output_padding < stride:
            assert _C.output_extent(whole, *window) == extent


def test_read_by_is_from_the_first_to_the_last_tap():
    for rng, extent, window in geometries(3, 4000):
        begin = rng.randint(0, extent)
        end = rng.randint(begin, extent + 3)
        read = [tap for o in range(begin, end) for tap in taps(o, *window)]
        assert _C.read_by((begin, end), *window) == ((min(read), max(read) + 1) if read else (0, 0))


def test_readers_of_holds_every_window_that_reads_an_input():
    for rng, extent, window in geometries(4, 4000):
        kernel, _, _, dilation = window
        begin = rng.randint(0, extent)
        end = rng.randint(begin, extent)
        first, last = _C.readers_of((begin, end), *window)
        span = {
            o for o in range(-60, 80) if taps(o, *window)[-1] >= begin and taps(o, *window)[0] < end and begin < end
        }
        assert set(range(first, last)) == span
        if dilation == 1 or kernel == 1:
            assert span == {o for o in range(-60, 80) if any(begin <= tap < end for tap in taps(o, *window))}


def wanted_by(rng, extent, window, ranks):
    """What the ranks of a convolution want, or any intervals at all: several hops, overhang, nothing."""
    if rng.random() < 0.5:
        outputs = _C.output_extent(extent, *window)
        return [_C.read_by(_C.owned(outputs, ranks, rank), *window) for rank in range(ranks)]
    out = []
    for _ in range(ranks):
        begin = rng.randint(-5, extent + 5)
        out.append((begin, begin + rng.choice([0, 1, 3, extent])))
    return out


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_plans_of_all_ranks_move_every_wanted_row_once(ranks):
    for rng, extent, window in geometries(ranks, 1500):
        wanted = wanted_by(rng, extent, window, ranks)
        plans = [_C.pull_plan(extent, rank, wanted) for rank in range(ranks)]
        owner = {row: rank for rank in range(ranks) for row in range(*_C.owned(extent, ranks, rank))}
        moves = False
        for rank, plan in enumerate(plans):
            rows = {row for row in range(*wanted[rank]) if 0 <= row < extent}
            assert set(range(*plan["wanted"])) == rows
            assert set(range(*plan["kept"])) == {row for row in rows if owner[row] == rank}
            assert plan["own"] == _C.owned(extent, ranks, rank)
            received = [(peer, row) for peer, begin, end in plan["receives"] for row in range(begin, end)]
            assert sorted(received) == sorted((owner[row], row) for row in rows if owner[row] != rank)
            moves |= bool(received)
            # Both sides of a message know it alike, and peers come in order: sums have one order on every run.
            for peer, begin, end in plan["receives"]:
                assert begin < end and (rank, begin, end) in plans[peer]["sends"]
            for peer, begin, end in plan["sends"]:
                assert begin < end and (rank, begin, end) in plans[peer]["receives"]
            for parts in (plan["sends"], plan["receives"]):
                peers = [part[0] for part in parts]
                assert peers == sorted(set(peers)) and rank not in peers
        assert all(plan["anyone_moves"] == moves for plan in plans)
