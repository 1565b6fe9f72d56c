"""Messages for which no thread sits and waits: of futures, of a second thread, polled. They end like those that are waited for."""

import datetime
import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from forked import forked, served_store

from torchtp.testing import run_ranks

SHORT = datetime.timedelta(seconds=2)


def _by_future(group):
    dist.irecv(torch.zeros(3), 1, group=group).get_future().wait()


def _by_polling(group):
    work = dist.irecv(torch.zeros(3), 1, group=group)
    while not work.is_completed():
        pass
    work.wait()


def _by_a_second_thread(group):
    errors = []

    def receive(tag):
        try:
            dist.recv(torch.zeros(3), 1, tag=tag, group=group)
        except dist.DistBackendError as error:
            errors.append(error)

    threads = [threading.Thread(target=receive, args=[tag]) for tag in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    raise errors[0]  # of the one whose message has not come


WAYS = [_by_future, _by_polling, _by_a_second_thread]


def _dies(rank, port, way):
    store = dist.PrefixStore(way.__name__, dist.TCPStore("127.0.0.1", port, wait_for_workers=False))
    dist.init_process_group("torchtp", store=store, rank=rank, world_size=2)
    dist.barrier()
    if rank == 0:
        way(None)
    dist.send(torch.ones(3), 0, tag=1)
    os.kill(os.getpid(), signal.SIGKILL)


def _deaths():
    with served_store() as (_, port):
        return [forked(2, _dies, port, way)[0] for way in WAYS]


def test_a_death_ends_what_nobody_sits_and_waits_for():
    (errors,) = run_ranks(_deaths, 1, backend=None, timeout=120)
    for error in errors:
        assert "rank 1 died (its process is gone) while rank 0 waited in recv of 12 bytes" in error


def _error_of(way, group):
    with pytest.raises(dist.DistBackendError) as raised:
        way(group)
    return str(raised.value)


def _is_silent(way):
    group, error = dist.new_group(timeout=SHORT), None
    if dist.get_rank() == 0:
        error = _error_of(way, group)
    else:
        dist.send(torch.ones(3), 0, tag=1, group=group)
    dist.barrier()
    return error


@pytest.mark.parametrize("way", [_by_future, _by_a_second_thread])
def test_the_timeout_counts_for_what_nobody_sits_and_waits_for(way):
    error, _ = run_ranks(_is_silent, 2, way, backend="torchtp")
    assert "rank 1 has not arrived after 2 s (the timeout of rank 0)" in error


def _waits_a_little():
    group, number, rank = dist.new_group(timeout=SHORT), torch.zeros(1), dist.get_rank()
    if rank == 0:
        work = dist.irecv(number, 1, group=group)
        with pytest.raises(RuntimeError):
            work.wait(datetime.timedelta(milliseconds=100))
        end = time.monotonic() + 2 * SHORT.total_seconds()
        while time.monotonic() < end:
            assert not work.is_completed()
    dist.barrier()
    if rank == 1:
        dist.send(torch.ones(1), 0, group=group)
    dist.barrier()
    if rank == 0:
        work.wait()
    return number.item()


def test_a_wait_with_a_timeout_of_its_own_does_not_begin_the_groups():
    assert run_ranks(_waits_a_little, 2, backend="torchtp") == [1, 0]


def _leaves():
    group, error = dist.new_group(), None
    if dist.get_rank() == 0:
        error = _error_of(_by_polling, group)
    else:
        dist.destroy_process_group(group)
    dist.barrier()
    return error


def test_who_asks_again_and_again_hears_that_the_peer_has_left():
    error, _ = run_ranks(_leaves, 2, backend="torchtp")
    assert "rank 1 left the group while rank 0 waited in recv of 12 bytes" in error
