"""The backend torchtp over several hosts: one error on every rank where ranks disagree or a rank, a host or a link is lost."""

import contextlib
import datetime
import os
import signal
import subprocess
import time

import pytest
import torch
import torch.distributed as dist
from stores import Store, at_call
from test_backend_errors import _error_of
from test_backend_signals import Impatient, raise_impatience, ticking

from torchtp.testing import ranks
from torchtp.testing.namespaces import Hosts, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "hosts can be made")


@pytest.fixture(scope="module")
def pairs():
    with contextlib.closing(Hosts((2, 2))) as made:
        yield made


def _mismatch(numels):
    group = dist.new_group()
    tensor = torch.ones(numels[dist.get_rank()])
    errors = [_error_of(lambda: dist.all_reduce(tensor, group=group)) for _ in range(2)]
    dist.destroy_process_group(group)
    return errors


@pytest.mark.parametrize("numels", [(3, 3, 4, 4), (30_000, 30_000, 40_000, 40_000), (30_000, 40_000, 30_000, 30_000)])
def test_hosts_that_disagree_get_one_error(pairs, numels):
    errors = [error for both in pairs.run(_mismatch, numels) for error in both]
    assert len(set(errors)) == 1, errors
    assert all(f"{numel} elements" in errors[0].replace(",", "") for numel in numels)


def _unequal_splits():
    rank, size = dist.get_rank(), dist.get_world_size()
    splits = [1] * size if rank else [1] * (size - 1) + [2]
    error = _error_of(lambda: dist.all_to_all_single(torch.empty(size), torch.ones(sum(splits)), None, splits))
    tensor = torch.ones(1)
    dist.all_reduce(tensor)  # the group is still in step
    assert tensor.item() == size
    return error


def test_splits_that_do_not_agree_between_hosts_are_one_error(pairs):
    errors = pairs.run(_unequal_splits)
    assert len(set(errors)) == 1
    assert "rank 0 sends 8 bytes to rank 3, which expects 4" in errors[0]


def _until_it_fails(group, limit=200):
    def calls():
        for _ in range(limit):
            dist.all_reduce(torch.ones(100_000), group=group)

    return _error_of(calls)


def _group(seconds):
    return dist.new_group(timeout=datetime.timedelta(seconds=seconds))


def _polled():
    group = _group(30)
    dist.barrier(group)
    if dist.get_rank() == 3:
        return dist.destroy_process_group(group)
    deadline = time.monotonic() + 60

    def ask():
        work = dist.irecv(torch.zeros(5), 3, group=group)
        while not work.is_completed():
            assert time.monotonic() < deadline
        work.wait()

    return _error_of(ask)


def test_who_asks_for_a_message_of_a_rank_that_has_left_is_told(pairs):
    errors = pairs.run(_polled)
    assert errors.pop() is None
    assert all("rank 3 left the group" in error for error in errors), errors


def _left_by_an_error():
    group = _group(30)
    dist.barrier(group)
    if dist.get_rank() != 3:
        return _error_of(lambda: dist.all_reduce(torch.ones(5), group=group))
    try:
        raise LookupError("no sample 17")
    except LookupError:
        dist.destroy_process_group(group)


def test_who_leaves_by_an_error_tells_those_on_other_hosts(pairs):
    errors = pairs.run(_left_by_an_error)
    assert errors.pop() is None
    assert all("rank 3 left the group (LookupError: no sample 17)" in error for error in errors), errors


def _death(folder, victim):
    group = _group(30)
    rank = dist.get_rank()
    dist.barrier(group)
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    error = _until_it_fails(group)
    with open(f"{folder}/{rank}", "w") as file:
        file.write(str(error))


@pytest.mark.parametrize("victim", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_death_is_an_error_on_every_host(tmp_path, monkeypatch, victim):
    monkeypatch.setattr(ranks, "_GRACE_SECONDS", 30.0)
    hosts = Hosts([2, 2])
    with pytest.raises(Exception, match=f"rank {victim} died"):
        hosts.run(_death, str(tmp_path), victim)
    for rank in {0, 1, 2, 3} - {victim}:
        text = (tmp_path / str(rank)).read_text()
        assert f"rank {victim}" in text and ("died" in text or "lost the connection" in text), text


def _death_of_a_parent(folder):
    """The last rank has a child, which outlives it until the others know; another's child ends its copies of the groups."""
    group = _group(30)
    rank = dist.get_rank()
    dist.barrier(group)
    child = os.fork() if rank in (0, 3) else None
    if child == 0 and rank == 0:
        dist.destroy_process_group()
        os._exit(0)
    if child == 0:
        end = time.monotonic() + 60
        while not all(os.path.exists(f"{folder}/{other}") for other in range(3)) and time.monotonic() < end:
            time.sleep(0.01)
        with open(f"{folder}/child", "w") as file:
            file.write(str(time.monotonic() < end))
        os._exit(0)
    if rank == 0:
        assert os.waitpid(child, 0)[1] == 0
    dist.barrier(group)
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    error = _until_it_fails(group)
    with open(f"{folder}/{rank}", "w") as file:
        file.write(str(error))


def test_a_forked_child_neither_hides_a_death_nor_ends_its_parents_connections(tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "_GRACE_SECONDS", 30.0)
    hosts = Hosts([2, 1, 1])  # the last is alone on its host: nobody there could tell of its death
    with pytest.raises(Exception, match="rank 3 died"):
        hosts.run(_death_of_a_parent, str(tmp_path))
    assert (tmp_path / "child").read_text() == "True"  # it lived until they knew
    for rank in range(3):
        text = (tmp_path / str(rank)).read_text()
        assert "lost the connection to rank 3 on another host" in text, text


def _death_over_the_last_answer(folder):
    """The last rank dies when it alone still needs the store for a group."""
    groups = dist.distributed_c10d._world.pg_map
    (name, store), calls = groups[dist.group.WORLD], []
    groups[dist.group.WORLD] = name, Store(store, calls.append)
    dist.new_group()
    if dist.get_rank() == 3:
        last = at_call(calls.count("get"), "get", lambda: os.kill(os.getpid(), signal.SIGKILL))
        groups[dist.group.WORLD] = name, Store(store, last)
    with open(f"{folder}/{dist.get_rank()}", "w") as file:
        file.write(_error_of(dist.new_group) or "made")


def test_nobody_goes_on_with_a_group_of_hosts_while_a_rank_still_needs_the_store(tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "_GRACE_SECONDS", 30.0)
    hosts = Hosts([2, 2])
    with pytest.raises(Exception, match="rank 3 died"):
        hosts.run(_death_over_the_last_answer, str(tmp_path))
    for rank in range(3):
        assert "rank 3 died" in (tmp_path / str(rank)).read_text()


def _death_before_a_group(folder):
    if dist.get_rank() == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    with open(f"{folder}/{dist.get_rank()}", "w") as file:
        file.write(_error_of(dist.new_group) or "made")


@pytest.mark.parametrize("sizes", [[2, 2], [3, 1]], ids=str)
def test_a_rank_of_another_host_that_dies_before_another_group_is_made_is_named(tmp_path, monkeypatch, sizes):
    monkeypatch.setattr(ranks, "_GRACE_SECONDS", 30.0)
    hosts = Hosts(sizes)
    with pytest.raises(Exception, match="rank 3 died"):
        hosts.run(_death_before_a_group, str(tmp_path))
    for rank in range(3):
        assert "rank 3 died (its process is gone) while the group was being made" in (tmp_path / str(rank)).read_text()


def _link_down():
    group = _group(2)
    dist.barrier(group)
    if dist.get_rank() == 2:
        subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
    errors = [_until_it_fails(group)]
    if dist.get_rank() == 2:
        subprocess.run(["ip", "link", "set", "eth0", "up"], check=True)
    errors.append(_until_it_fails(group))  # back, but too late for this group
    return errors


def test_a_host_whose_network_is_down_is_an_error_that_stays(pairs):
    for first, second in pairs.run(_link_down):
        assert "timeout" in first and "another host" in first, first
        assert first == second


def _out_of_reach():
    """One host of another, for what is connected anew."""
    route = ["prohibit", "10.77.0.3"]
    if dist.get_rank() == 1:
        subprocess.run(["ip", "route", "add", *route], check=True)
    error = _error_of(lambda: _group(600))
    if dist.get_rank() == 1:
        subprocess.run(["ip", "route", "del", *route], check=True)
    return error


def test_a_connection_that_finds_no_way_is_heard_of_by_all():
    with contextlib.closing(Hosts((1, 1, 1))) as hosts:
        errors = hosts.run(_out_of_reach, timeout=30)
    assert len(set(errors)) == 1, errors
    assert "rank 1 cannot make a process group of several hosts: cannot connect to rank 2 at 10.77.0.3" in errors[0]


def _interrupted(waits):
    """Rank 0 is interrupted while it waits for the other host."""
    store, group = dist.distributed_c10d._get_default_store(), dist.new_group()
    calls = {
        "all_reduce": lambda: dist.all_reduce(torch.ones(100_000), group=group),
        "wait": lambda: dist.all_reduce(torch.ones(100_000), group=group, async_op=True).wait(),
        "recv": lambda: dist.recv(torch.ones(4), 3, group=group),
    }
    if dist.get_rank() == 0:
        with ticking(raise_impatience), pytest.raises(Impatient):
            calls[waits]()
        store.set(f"raised in {waits}", "yes")
    elif waits != "recv" and dist.get_rank() == 1:
        return _error_of(calls[waits])
    else:
        store.wait([f"raised in {waits}"])
    return _until_it_fails(group, 3)  # what the first host sent before may end the other's first call well


@pytest.mark.parametrize("waits", ["all_reduce", "wait", "recv"])
def test_what_a_signal_handler_raises_ends_the_group_on_every_host(pairs, waits):
    errors = pairs.run(_interrupted, waits)
    assert all(
        "rank 0 was interrupted by a signal (Impatient: no longer) while it waited in" in str(error) for error in errors
    ), errors


def _late():
    group = _group(3)  # for making it, too, on a machine that has other work
    dist.barrier(group)
    if dist.get_rank() >= 2:
        me = os.getpid()
        subprocess.Popen(["sh", "-c", f"sleep 7; kill -CONT {me}"])
        os.kill(me, signal.SIGSTOP)
    return _until_it_fails(group)


def test_a_host_that_comes_back_too_late_is_told_why(pairs):
    errors = pairs.run(_late)
    assert all(error is not None for error in errors)
    for error in errors[:2]:
        assert "timeout" in error and ("rank 2" in error or "rank 3" in error), error
    for error in errors[2:]:
        assert "timeout" in error or "lost the connection" in error, error


def _waiting_for_another_host():
    one = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=3))
    across, others = dist.new_group([0, 2]), dist.new_group([1, 2])
    rank, error = dist.get_rank(), None
    dist.barrier()
    if rank == 1:
        error = _error_of(lambda: dist.all_reduce(torch.ones(4), group=one))
    if rank in (1, 2):
        dist.barrier(others)  # rank 2 comes when rank 1 has had its error
    if rank in (0, 2):
        dist.all_reduce(torch.ones(4), group=across)
    return error or dist.distributed_c10d._get_process_group_name(across)


def test_a_rank_that_waits_for_another_host_is_told_of_in_its_other_groups(pairs):
    name, error, _, _ = pairs.run(_waiting_for_another_host)
    assert "rank 0 has not arrived after 3 s" in error, error
    assert f"has been in allreduce #0 (SUM, fp32, 4 elements) of group '{name}' for " in error, error
    assert "(rank 1 has not arrived there)" in error, error
