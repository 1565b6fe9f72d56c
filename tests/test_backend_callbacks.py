"""Futures of the backend torchtp: what they hold, and where calls of their callbacks stand among the program's own."""

import unittest.mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from torchtp.testing import run_ranks


def _tensors():
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.full((50_000,), float(rank + 1))
    work = dist.all_reduce(tensor, async_op=True)
    doubled = work.get_future().then(lambda future: future.value()[0] * 2)
    assert (doubled.wait() == size * (size + 1)).all()
    (result,) = work.get_future().wait()
    assert result.data_ptr() == tensor.data_ptr()
    assert work.is_completed() and work.is_success()
    assert work.result()[0].data_ptr() == tensor.data_ptr()


def _callbacks_that_wait():
    """As PowerSGD's hook does: a callback waits for later works of its group, asynchronous and not, also in callbacks."""
    size, seen = dist.get_world_size(), []

    def inner(future):
        tensor = future.value()[0].clone()
        dist.all_reduce(tensor, async_op=True).wait()
        seen.append(tensor[0].item())
        return tensor

    def outer(future):
        works = [dist.all_reduce(torch.ones(numel), async_op=True) for numel in (3, 40_000)]
        tensor = future.value()[0].clone()
        dist.all_reduce(tensor)
        assert all(work.is_completed() for work in works)
        later = dist.all_reduce(tensor, async_op=True).get_future().then(inner)
        return later.wait()

    for numel in (5, 50_000):
        future = dist.all_reduce(torch.ones(numel), async_op=True).get_future().then(outer)
        assert (future.wait() == size**4).all()
    assert seen == [float(size**4)] * 2


@pytest.mark.parametrize("use", [_tensors, _callbacks_that_wait])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_futures(use, size):
    run_ranks(use, size, backend="torchtp")


def _first_or_last(program):
    """Rank 0 runs the program when the others have: its callbacks run where they are attached, theirs on the worker."""
    store, size = dist.distributed_c10d._get_default_store(), dist.get_world_size()
    if dist.get_rank() == 0:
        store.wait([f"{program.__name__} {rank}" for rank in range(1, size)])
        return program(lambda work: work.wait())
    try:
        return program(lambda work: None)
    finally:
        store.set(f"{program.__name__} {dist.get_rank()}", "")


def _reduced(numel):
    return dist.all_reduce(torch.ones(numel), async_op=True)


def _then_call(work, numel, seen):
    """A chain of two callbacks, each with a call of its own, of which no two have as many elements."""

    def wait(future):
        return _reduced(numel + 1).get_future().wait()[0]

    def call(future):
        results = torch.ones(numel + 2), torch.ones(numel + 3)
        later = dist.all_reduce(results[0], async_op=True)
        dist.all_reduce(results[1])
        seen.append(numel)
        later.get_future().then(lambda future: dist.all_reduce(future.value()[0]))
        return results[1]

    return work.get_future().then(wait).then(call)


def _attached_at_once(wait):
    seen, futures = [], []
    for numel in range(10, 60, 10):
        work = _reduced(numel)
        wait(work)
        futures.append(_then_call(work, numel, seen))
    return seen, futures


def _attached_when_all_are_called(wait):
    seen, numels = [], range(10, 60, 10)
    works = [_reduced(numel) for numel in numels]
    for work in works:
        wait(work)
    return seen, [_then_call(work, numel, seen) for numel, work in zip(numels, works, strict=True)]


def _attached_to_some(wait):
    """With calls between that nobody attaches to."""
    seen, futures = [], []
    for numel in range(10, 60, 10):
        work = _reduced(numel)
        wait(work)
        before = _reduced(numel + 5)
        futures.append(_then_call(work, numel, seen))
        for later in (before, dist.broadcast(torch.ones(numel + 6), 0, async_op=True), dist.barrier(async_op=True)):
            wait(later)
    return seen, futures


def _same_order(program):
    seen, futures = _first_or_last(program)
    for future in futures:
        assert (future.wait() == dist.get_world_size()).all()
    assert seen == list(range(10, 60, 10))


@pytest.mark.parametrize("program", [_attached_at_once, _attached_when_all_are_called, _attached_to_some])
@pytest.mark.parametrize("size", [2, 3])
def test_calls_of_callbacks_stand_where_the_future_was_asked_for(program, size):
    run_ranks(_same_order, size, program, backend="torchtp")


def _power_sgd(waits):
    """Parameters after steps with seven buckets. Where this rank `waits`, the hook's callbacks run in its own thread."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)]), bucket_cap_mb=0.02)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    all_reduce = dist.all_reduce

    def waited(*args, **kwargs):
        work = all_reduce(*args, **kwargs)
        work.wait()
        return work

    generator = torch.Generator().manual_seed(dist.get_rank())
    with unittest.mock.patch.object(dist, "all_reduce", waited if waits else all_reduce):
        for _ in range(8):
            optimizer.zero_grad()
            model(torch.randn(8, 64, generator=generator)).square().mean().backward()
            optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def _power_sgd_of_several_buckets():
    in_order = _power_sgd(True)
    assert in_order.isfinite().all()
    for waits in (False, dist.get_rank() == 0, dist.get_rank() != 0):
        assert torch.equal(_power_sgd(waits), in_order)


@pytest.mark.parametrize("size", [2, 3])
def test_power_sgd_of_several_buckets(size):
    run_ranks(_power_sgd_of_several_buckets, size, backend="torchtp")
