"""A group's threads, for asynchronous calls and for messages that nobody waits for, are woken when there is work for them."""

import os
import pathlib
import time

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


def _messages_beside_a_waiting_one():
    """How often the thread that looks after messages slept while others were added to the first, and how often it may have."""
    if dist.get_rank() == 0:
        group = dist.new_group()
        before = _threads()
        messages = [dist.irecv(torch.zeros(4), 1, group=group)]
        (watch,) = _threads() - before
        first, start = _times_slept(watch), time.monotonic()
        messages += [dist.irecv(torch.zeros(4), 1, group=group) for _ in range(3000)]
        slept, looks = _times_slept(watch) - first, (time.monotonic() - start) / 2e-3
    else:
        group, slept, looks = dist.new_group(), 0, 0.0
    dist.barrier()  # nothing is sent before all wait for it
    if dist.get_rank() == 0:
        for message in messages:
            message.wait()
    else:
        for _ in range(3001):
            dist.send(torch.ones(4), 0, group=group)
    return slept, looks


def test_a_message_does_not_wake_who_looks_after_others():
    slept, looks = run_ranks(_messages_beside_a_waiting_one, 2, backend="torchtp")[0]
    assert slept < 300 + 2 * looks  # it looks every 2 ms, and may find the lock taken
