"""Calls whose input lies over their output, in a segment or outside, otherwise than in place."""

import itertools

import pytest
import torch
import torch.distributed as dist

from torchtp.testing import run_ranks


def _allocate(numel, in_segment):
    if not in_segment:
        return torch.empty(numel)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    return backend.allocate_tensor(numel, dtype=torch.float32, device=torch.device("cpu"))


def overlapping():
    """One side of a call lies over the other, on all ranks or on one: what counts is what stood there when the call began."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for numel, in_segment, is_alone in itertools.product((6, 30_000, 400_000), (False, True), (False, True)):
        case = (numel, in_segment, is_alone)
        shift = numel // 2 if is_alone and rank else numel  # half over one part, half over the next
        whole = _allocate(size * numel, in_segment)
        parts = list(whole.chunk(size))
        begin = min(shift, (size - 1) * numel)
        over = slice(begin, begin + numel) if not is_alone or rank == size - 1 else None

        def apart(values, over=over, whole=whole, in_segment=in_segment, numel=numel):
            mine = _allocate(numel, in_segment) if over is None else whole[over]
            return mine.copy_(values)

        values = [torch.arange(numel) % 89 + 1000.0 * r for r in range(size)]
        dist.all_gather_into_tensor(whole, apart(values[rank]))
        assert torch.equal(whole, torch.cat(values)), ("all_gather_into_tensor", case)
        dist.all_gather(parts, apart(values[rank]))
        assert torch.equal(whole, torch.cat(values)), ("all_gather", case)
        dist.gather(apart(values[rank]), parts if rank == size - 1 else None, size - 1)
        assert rank != size - 1 or torch.equal(whole, torch.cat(values)), ("gather", case)

        inputs = [torch.arange(size * numel) % 83 + 100.0 * r for r in range(size)]
        expected = sum(inputs).view(size, numel)[rank]
        output = apart(0)
        whole.copy_(inputs[rank])
        dist.reduce_scatter_tensor(output, whole)
        assert torch.equal(output, expected), ("reduce_scatter_tensor", case)
        whole.copy_(inputs[rank])
        dist.reduce_scatter(output, parts)
        assert torch.equal(output, expected), ("reduce_scatter", case)
        whole.copy_(inputs[rank])
        dist.scatter(output, parts if rank == size - 1 else None, size - 1)
        assert torch.equal(output, inputs[-1].view(size, numel)[rank]), ("scatter", case)

        swapped = torch.cat([inputs[r].view(size, numel)[rank] for r in range(size)])
        whole.copy_(inputs[rank])
        dist.all_to_all_single(whole, whole)
        assert torch.equal(whole, swapped), ("all_to_all_single", case)
        whole.copy_(inputs[rank])
        dist.all_to_all(parts[::-1], parts)
        assert torch.equal(torch.cat(parts[::-1]), swapped), ("all_to_all", case)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_overlapping_calls_read_what_stood_there_when_they_began(size):
    run_ranks(overlapping, size, backend="torchtp")
