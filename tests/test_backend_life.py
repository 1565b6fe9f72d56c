"""Groups of the backend torchtp come and go without leaving anything behind; forked data loaders do no harm."""

import gc
import os
import subprocess
import sys
import time
import traceback

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from torchtp.testing import RanksFailed, run_ranks


def _holdings():
    """What this process holds: descriptors, threads, mappings of shared memory."""
    with open("/proc/self/maps") as file:
        shared = sum("memfd" in line or "/dev/shm" in line for line in file)
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), shared


def _hook(group, bucket):
    future = dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


def _come_and_go(count):
    size, kept, seen = dist.get_world_size(), [], []
    for index in range(count):
        group = dist.new_group()
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8), process_group=group)
        model.register_comm_hook(group, _hook)
        model(torch.ones(2, 8)).sum().backward()
        work = dist.all_reduce(torch.ones(10_000), group=group, async_op=True)
        work.get_future().add_done_callback(lambda future: seen.append(future.value()[0][0].item()))
        message = dist.isend(torch.ones(3), (dist.get_rank() + 1) % size, group=group)
        dist.recv(torch.empty(3), (dist.get_rank() - 1) % size, group=group)
        message.wait()
        dist.destroy_process_group(group)
        kept = [(model, work)] if index % 2 else []  # the DDP object and the work outlive their group
        del model, group, work, message
        if index == 9:
            gc.collect()
            before = _holdings()
        if index % 10 == 9:
            gc.collect()
    kept.clear()
    gc.collect()
    assert seen == [float(size)] * count
    return before, _holdings()


def test_a_hundred_groups_with_models_and_hooks_leave_nothing_behind():
    for before, after in run_ranks(_come_and_go, 2, 100, backend="torchtp", timeout=200):
        assert all(now <= then for now, then in zip(after, before, strict=True)), (before, after)


def _default_groups(count):
    """The whole world ends and begins again, on one store."""
    holdings = []
    for _ in range(count):
        dist.init_process_group("torchtp")
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
        model(torch.ones(2, 8)).sum().backward()
        dist.destroy_process_group()
        del model
        gc.collect()
        holdings.append(_holdings())
    return holdings[4], holdings[-1]


def test_the_default_group_ends_and_begins_again_without_a_trace():
    for before, after in run_ranks(_default_groups, 2, 25, backend=None, timeout=100):
        assert all(now <= then for now, then in zip(after, before, strict=True)), (before, after)


class Numbers(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((1000,), float(index))


def _loading():
    """Workers are forked, work and end while collectives run on the group's own thread and in the main one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    lent = backend.allocate_tensor(1000, dtype=torch.float32, device=torch.device("cpu"))
    total = 0.0
    for _ in range(2):
        works = []
        loader = DataLoader(Numbers(), batch_size=4, num_workers=2, multiprocessing_context="fork")
        for numbers in loader:
            lent.copy_(numbers[0])
            works.append(dist.all_reduce(torch.ones(50_000), async_op=True))
            dist.all_reduce(lent)
            assert (lent == size * numbers[0][0]).all()
            total += numbers.sum().item()
        for work in works:
            work.wait()
    assert total == 2 * 1000 * sum(range(64))
    tensor = torch.full((3,), float(rank))
    dist.all_reduce(tensor)
    assert (tensor == size * (size - 1) / 2).all()


@pytest.mark.parametrize("size", [1, 2])
def test_loader_workers_do_not_disturb_collectives(size):
    run_ranks(_loading, size, backend="torchtp")


def _destroyed_beside_workers():
    """The group ends while forked workers, which inherited its memory and descriptors, live on; another one begins."""
    group = dist.new_group()
    dist.all_reduce(torch.ones(1000), group=group, async_op=True).wait()
    loader = iter(DataLoader(Numbers(), batch_size=4, num_workers=2, multiprocessing_context="fork"))
    next(loader)
    dist.all_reduce(torch.ones(1000), group=group)
    dist.destroy_process_group(group)
    other = dist.new_group()
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=other)
    assert sum(len(numbers) for numbers in loader) == 60
    dist.all_reduce(tensor, group=other)
    assert (tensor == dist.get_world_size() ** 2).all()
    dist.destroy_process_group(other)


def test_a_group_ends_beside_living_loader_workers():
    run_ranks(_destroyed_beside_workers, 2, backend="torchtp")


def _dies_beside_its_worker(seen):
    """A loader's worker outlives its rank, with all that it inherited: the rank's death is seen all the same."""
    if dist.get_rank() == 1:
        if os.fork() == 0:
            deadline = time.monotonic() + 30
            while not seen.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            os._exit(0)
        dist.barrier()
        os._exit(3)
    dist.barrier()
    start = time.monotonic()
    with pytest.raises(dist.DistBackendError, match="rank 1 died"):
        dist.all_reduce(torch.ones(3))
    assert time.monotonic() - start < 25  # before the worker's own end
    seen.touch()


def test_the_death_of_a_rank_whose_worker_lives_is_seen(tmp_path):
    with pytest.raises(RanksFailed) as raised:
        run_ranks(_dies_beside_its_worker, 2, tmp_path / "seen", backend="torchtp", fresh=True)
    assert set(raised.value.failures) == {1}


def _calls_of_a_forked_child():
    """What each call in a child says, and that the rank itself goes on."""
    calls = (
        lambda: dist.all_reduce(torch.ones(3)),
        lambda: dist.all_reduce(torch.ones(3), async_op=True).wait(),
        lambda: dist.isend(torch.ones(3), 1 - dist.get_rank()).wait(),
    )
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        for call in calls:
            try:
                call()
            except dist.DistBackendError as error:
                os.write(writing, f"{error}\n".encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as pipe:
        told = pipe.read().splitlines()
    assert os.waitpid(pid, 0)[1] == 0
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert (tensor == dist.get_world_size()).all()
    return told


def test_a_forked_child_cannot_make_the_calls_of_its_rank():
    for told in run_ranks(_calls_of_a_forked_child, 2, backend="torchtp"):
        assert len(told) == 3 and all("was forked from a rank" in error for error in told), told


def _a_group_of_a_forked_child():
    """The child makes a group of its own, whose threads take the places of those that it has not inherited."""
    dist.all_reduce(torch.ones(4), async_op=True).wait()
    pid = os.fork()
    if pid == 0:
        try:
            group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
            tensor = torch.ones(4)
            dist.all_reduce(tensor, group=group, async_op=True).wait()
            inherited = dist.group.WORLD._get_backend(torch.device("cpu"))
            inherited.shutdown()
            dist.all_reduce(tensor, group=group, async_op=True).wait()
            dist.destroy_process_group()
            os._exit(0 if (tensor == 1).all() else 1)
        except BaseException:
            traceback.print_exc()
            os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert (tensor == dist.get_world_size()).all()


def test_a_forked_child_may_make_a_group_and_end_it_with_the_inherited_one():
    # Fresh ones: the child would end groups of gloo, which earlier tests left, and gloo joins threads that it has not.
    run_ranks(_a_group_of_a_forked_child, 2, backend="torchtp", fresh=True)


def _a_wait_of_forked_children(folder):
    """Two ranks without the group that they inherited, whose memory is unmapped: a long wait tells of itself in their own alone."""
    dist.all_reduce(torch.ones(4))
    children = []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            try:
                dist.destroy_process_group()
                os.environ["TORCHTP_HEAP_BYTES"] = str(100_000_000)  # another mapping, at another address
                dist.init_process_group("torchtp", init_method=f"file://{folder}/store", rank=rank, world_size=2)
                time.sleep(rank * 0.5)  # so that the other one waits for long
                tensor = torch.ones(2)
                dist.all_reduce(tensor)
                dist.destroy_process_group()
                os._exit(0 if (tensor == 2).all() else 1)
            except BaseException:
                traceback.print_exc()
                os._exit(2)
        children.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0, 0]


def test_forked_children_wait_in_a_group_of_their_own_after_they_ended_the_inherited_one(tmp_path):
    run_ranks(_a_wait_of_forked_children, 1, tmp_path, backend="torchtp", fresh=True)


_FORKS = """
import os, sys
import torch, torch.distributed as dist, torchtp
dist.init_process_group("torchtp", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(4), async_op=True).wait()  # starts a thread, which no child has
dist.all_reduce(torch.ones(4))  # that thread is done: a child of Python 3.10 hangs if another thread was just entering Python
child = os.fork()
if child == 0:
    sys.exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_that_ends_as_a_program_does_waits_for_no_thread_of_its_parent():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _FORKS], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.strip() == "7", done.stderr


_INTERPRETS = """
import torch
import torch.distributed as dist
import torchtp
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
dist.init_process_group("torchtp", store=dist.HashStore(), rank=0, world_size=1)
interpreters.destroy(interpreters.create())
dist.all_reduce(torch.ones(4))
dist.destroy_process_group()
print("ended")
"""


def test_a_program_with_subinterpreters_ends_its_groups():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _INTERPRETS], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.strip() == "ended", done.stderr
