"""The worker of a group runs asynchronous calls; it costs nothing where there are none."""

import os
import pathlib

import pytest
import torch
import torch.distributed as dist

from torchtp.testing import run_ranks


def _threads():
    return set(os.listdir("/proc/self/task"))


def _times_slept(thread):
    status = pathlib.Path(f"/proc/self/task/{thread}/status").read_text()
    return int(status.split("voluntary_ctxt_switches:")[1].split()[0])


def _synchronous_after_asynchronous():
    group = dist.new_group()
    tensor = torch.zeros(4)
    dist.all_reduce(tensor, group=group)
    before = _threads()
    dist.all_reduce(tensor, group=group, async_op=True).wait()
    (worker,) = _threads() - before
    first = _times_slept(worker)
    for _ in range(400):
        dist.all_reduce(tensor, group=group)
    alone = _times_slept(worker) - first
    for _ in range(400):
        dist.all_reduce(tensor, group=group, async_op=True).wait()
    return alone, _times_slept(worker) - first - alone


@pytest.mark.parametrize("size", [1, 2])
def test_synchronous_calls_do_not_wake_the_worker(size):
    for alone, asynchronous in run_ranks(_synchronous_after_asynchronous, size, backend="torchtp"):
        assert alone <= 2  # it may yet have been falling asleep
        assert asynchronous > 20  # what is counted is counted
