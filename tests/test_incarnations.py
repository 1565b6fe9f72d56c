"""The ranks that torchrun starts after a failure meet on the store of those before, whatever these have said there."""

import datetime
import os
import signal

import pytest
import torch
import torch.distributed as dist
from forked import forked, served_store
from stores import Store, at_call

from torchtp import incarnations
from torchtp.testing import run_ranks


def _die():
    os.kill(os.getpid(), signal.SIGKILL)


def _client(port):
    return dist.TCPStore("127.0.0.1", port, wait_for_workers=False)


def _lives(rank, port, ends):
    """`ends`: where rank 2 ends, and the others while they wait for it; None: nowhere."""
    os.environ["TORCHELASTIC_RUN_ID"] = "test"  # of this process alone
    if ends == "before any group" and rank == 2:
        return None
    store = _client(port)
    if last_look := {"before any group": 3, "in the making of a group": 12}.get(ends):
        store = Store(store, at_call(last_look, "check", _die))
    timeout = datetime.timedelta(seconds=30)
    dist.init_process_group("torchtp", store=store, rank=rank, world_size=3, timeout=timeout)
    if ends == "before another group" and rank == 2:
        _die()
    group = dist.new_group()
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    if ends == "before a part" and rank == 2:
        _die()
    dist.group.WORLD.split_group([0, 1, 2], group_name="part").allreduce(tensor).wait()
    dist.destroy_process_group()
    return tensor.tolist()


def _dies_and_lives(ends):
    with served_store() as (_, port):
        return [forked(3, _lives, port, end) for end in (ends, ends, None, None)]


@pytest.mark.parametrize(
    "ends", ["before any group", "in the making of a group", "before another group", "before a part"]
)
def test_ranks_that_are_started_again_meet_on_the_same_store(ends):
    ((*dead, fourth, last),) = run_ranks(_dies_and_lives, 1, ends, backend=None, timeout=120)
    assert all([9.0] * 3 not in life for life in dead)
    assert fourth == last == [[9.0] * 3] * 3


def _waits_in_vain(rank, port):
    return incarnations.agree(_client(port), rank, 3, datetime.timedelta(seconds=1)) if rank != 1 else None


def _waiting_in_vain():
    with served_store() as (_, port):
        return forked(3, _waits_in_vain, port)


def test_a_rank_that_does_not_come_to_its_incarnation_is_named():
    ((first, _, last),) = run_ranks(_waiting_in_vain, 1, backend=None)
    for rank, error in ((0, first), (2, last)):
        assert (
            f"rank 1 did not come to the creation of the process group within 1 s; rank {rank} waited for it" in error
        )
