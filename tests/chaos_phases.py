"""What the ranks of tests/chaos.py do with a process group, phase by phase; each checks its results."""

import torch
import torch.distributed as dist
from torch import nn

from torchtp.gradients import GradientReducer

ROWS = 4
# Made once, before ranks are forked: what a rank reckons between calls it can't be told of a death in.
PATTERN = (torch.arange(700_000) % 7).float()


def tensor_of(rank, numel):
    return PATTERN[:numel] + rank


def sum_of(size, numel):
    return PATTERN[:numel] * size + size * (size - 1) / 2


def collectives(rank, size):
    for numel in (3, 700_000):
        tensor = tensor_of(rank, numel)
        dist.all_reduce(tensor)
        assert torch.equal(tensor, sum_of(size, numel))
        root = numel % size
        tensor = tensor_of(rank, numel)
        dist.broadcast(tensor, root)
        assert torch.equal(tensor, tensor_of(root, numel))
        gathered = torch.empty(size * numel)
        dist.all_gather_into_tensor(gathered, tensor_of(rank, numel))
        every = torch.cat([tensor_of(each, numel) for each in range(size)])
        assert torch.equal(gathered, every)
        scattered = torch.empty(numel)
        dist.reduce_scatter_tensor(scattered, every + rank)
        assert torch.equal(scattered, size * tensor_of(rank, numel) + size * (size - 1) / 2)
        turned = torch.empty(size * numel)
        dist.all_to_all_single(turned, every + 10 * rank)
        assert torch.equal(turned, torch.cat([tensor_of(rank, numel) + 10 * each for each in range(size)]))
        dist.barrier()


def asynchronous(rank, size):
    numels = (5, 400_000, 1000, 80_000, 3, 200_000)
    tensors = [tensor_of(rank, numel) for numel in numels]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work, tensor in zip(works, tensors, strict=True):
        work.wait()
        assert torch.equal(tensor, sum_of(size, tensor.numel()))


def exchange(rank, size):
    """Everybody wants its rows and one more at both ends; the gradients of those go back."""
    group, extent = dist.group.WORLD.group_name, ROWS * size
    begins, ends = [ROWS * each - 1 for each in range(size)], [ROWS * each + ROWS + 1 for each in range(size)]
    rows = torch.arange(extent).view(1, 1, extent, 1)
    wanted = torch.arange(begins[rank], ends[rank]).view(1, 1, -1, 1)
    counts = torch.tensor(
        [sum(begin <= row < end for begin, end in zip(begins, ends, strict=True)) for row in range(extent)]
    )
    for step, width in enumerate((1, 50, 20_000, 7, 3000)):
        mine = slice(ROWS * rank, ROWS * (rank + 1))
        part = (rows[:, :, mine] + step).expand(2, 3, ROWS, width).float().contiguous()
        pulled = torch.ops.torchtp.pull(part, 2, extent, begins, ends, group)
        inside = (wanted >= 0) & (wanted < extent)
        assert torch.equal(pulled, ((wanted + step) * inside).expand_as(pulled).float())
        pushed = torch.ops.torchtp.push_add(torch.ones_like(pulled), 2, extent, begins, ends, group)
        assert torch.equal(pushed, counts[mine].view(1, 1, -1, 1).expand_as(pushed).float())


def gradients(rank, size):
    model = nn.Sequential(nn.Linear(40, 300), nn.Linear(300, 40))
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.01)
    reducer = GradientReducer(model, bucket_bytes=20_000, first_bucket_bytes=4000)
    for step in range(3):
        model.zero_grad()
        model(torch.full((2, 40), float(rank + step))).sum().backward()
        # The first layer's gradient is linear in the input, whose mean is known.
        expected = 2 * 0.01 * 40 * ((size - 1) / 2 + step)
        assert torch.allclose(model[0].weight.grad, torch.tensor(expected)), (model[0].weight.grad[0, 0], expected)
    del reducer


def messages(rank, size):
    for step in range(10):
        numel = 200_000 if step == 5 else 10
        sending = dist.isend(tensor_of(rank + step, numel), (rank + 1) % size)
        received = torch.empty(numel)
        dist.recv(received, (rank - 1) % size)
        sending.wait()
        assert torch.equal(received, tensor_of((rank - 1) % size + step, numel))


PHASES = (collectives, asynchronous, exchange, gradients, messages)
