"""Collectives of more than 2^31 bytes: every count and offset on the way is wide enough."""

import pytest
import torch
import torch.distributed as dist

from torchtp.testing import run_ranks

NUMEL = 2**31 + 4099  # of one byte each; no multiple of anything
HALF = 2**30 + 4099
PIECE = 16 << 20


PERIOD = 113
BYTES = torch.arange(PIECE + PERIOD).remainder(PERIOD).to(torch.uint8)


def pieces(tensor, *ranks):
    """The parts of a tensor, and for each what the ranks put there: (i + 5 r) mod 113 in element i, and its sum."""
    for start in range(0, tensor.numel(), PIECE):
        part = tensor[start : start + PIECE]
        phases = [(start + 5 * rank) % PERIOD for rank in ranks]
        yield part, sum(BYTES[phase : phase + part.numel()] for phase in phases)


def fill(tensor, rank):
    for part, bytes_of_rank in pieces(tensor, rank):
        part.copy_(bytes_of_rank)
    return tensor


def holds(tensor, *ranks):
    return all(torch.equal(part, expected) for part, expected in pieces(tensor, *ranks))


def zeros(numel):
    return torch.zeros(numel, dtype=torch.uint8)


def all_reduce(rank):
    tensor = fill(zeros(NUMEL), rank)
    dist.all_reduce(tensor)
    return holds(tensor, 0, 1)


def reduce(rank):
    tensor = fill(zeros(NUMEL), rank)
    dist.reduce(tensor, 1)
    return holds(tensor, 0, 1) if rank == 1 else holds(tensor, 0)


def broadcast(rank):
    tensor = fill(zeros(NUMEL), rank)
    dist.broadcast(tensor, 1)
    return holds(tensor, 1)


def all_gather(rank):
    output = zeros(2 * HALF)
    dist.all_gather_into_tensor(output, fill(output[rank * HALF : (rank + 1) * HALF], rank))
    return holds(output[:HALF], 0) and holds(output[HALF:], 1)


def reduce_scatter(rank):
    output, tensor = zeros(HALF), zeros(2 * HALF)
    for part in tensor.split(HALF):
        fill(part, rank)
    dist.reduce_scatter_tensor(output, tensor)
    return holds(output, 0, 1)


def gather(rank):
    outputs = [zeros(NUMEL) for _ in range(2)] if rank == 0 else None
    dist.gather(fill(zeros(NUMEL), rank), outputs, 0)
    return rank == 1 or all(holds(output, r) for r, output in enumerate(outputs))


def scatter(rank):
    output = zeros(NUMEL)
    dist.scatter(output, [fill(zeros(NUMEL), r) for r in range(2)] if rank == 0 else None, 0)
    return holds(output, rank)


def all_to_all(rank):
    """Rank 0 keeps little and sends much, rank 1 the other way round."""
    sends, receives = ([5, NUMEL], [5, 7]) if rank == 0 else ([7, 11], [NUMEL, 11])
    output, tensor = zeros(sum(receives)), zeros(sum(sends))
    for target, part in enumerate(tensor.split(sends)):
        fill(part, 10 * rank + target)
    dist.all_to_all_single(output, tensor, receives, sends)
    return all(holds(part, 10 * source + rank) for source, part in enumerate(output.split(receives)))


def send(rank):
    tensor = fill(zeros(NUMEL), rank)
    dist.send(tensor, 1) if rank == 0 else dist.recv(tensor, 0)
    return holds(tensor, 0)


def _memory():
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable:"))


@pytest.mark.long
@pytest.mark.parametrize(
    "collective",
    [all_reduce, reduce, broadcast, all_gather, reduce_scatter, gather, scatter, all_to_all, send],
    ids=lambda collective: collective.__name__,
)
def test_more_than_two_gigabytes_arrive(collective):
    if _memory() < 12 << 30:
        pytest.skip("needs 12 GB of free memory")
    assert run_ranks(_call, 2, collective, backend="torchtp", timeout=600) == [True, True]


def _call(collective):
    return collective(dist.get_rank())
