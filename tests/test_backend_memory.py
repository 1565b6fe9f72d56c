"""Where the memory of a cgroup ends, ranks get an error; the kernel, which would kill one of them, is not asked."""

import datetime
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forked import forked, served_store

from torchtp.testing import run_ranks

TIMEOUT = datetime.timedelta(seconds=100)
MB = 1 << 20


class Cgroup:
    """A group of processes below our own, with a limit to their memory."""

    def __init__(self, path, limit, usage):
        self.path, self.limit, self.usage = path, path / limit, path / usage

    def enter(self):
        (self.path / "cgroup.procs").write_text(str(os.getpid()))

    def leave_only(self, num_bytes):
        self.limit.write_text(str(int(self.usage.read_text()) + num_bytes))


def _own_place():
    """The folder of the cgroup that limits our memory, and how its files for limit and usage are called."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for _, controllers, path in lines:
        if "memory" in controllers.split(","):
            return Path("/sys/fs/cgroup/memory" + path), "memory.limit_in_bytes", "memory.usage_in_bytes"
    return Path("/sys/fs/cgroup" + lines[-1][2]), "memory.max", "memory.current"


@pytest.fixture
def cgroup():
    parent, limit, usage = _own_place()
    path = parent / f"torchtp-test-{os.getpid()}"
    try:
        path.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    try:
        made = Cgroup(path, limit, usage)
        if not os.access(made.limit, os.W_OK):
            pytest.skip(f"memory is not limited by the groups in {parent}: enable it in its cgroup.subtree_control")
        yield made
    finally:
        path.rmdir()


def _make_group(rank, port, cgroup, num_bytes):
    """Both ranks are in the cgroup and may take `num_bytes` more there before they make a process group."""
    cgroup.enter()
    store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
    store.set(f"{rank} is in", "")
    store.wait(["0 is in", "1 is in"])
    if rank == 0:
        cgroup.leave_only(num_bytes)
        store.set("limited", "")
    store.wait(["limited"])
    dist.init_process_group("torchtp", store=store, rank=rank, world_size=2, timeout=TIMEOUT)


def _forked(body, *args):
    with served_store() as (_, port):
        return forked(2, body, port, *args)


def test_a_group_that_finds_no_memory_is_the_error_of_all(cgroup):
    (errors,) = run_ranks(_forked, 1, _make_group, cgroup, 9 * MB, backend=None)
    assert errors[0] == errors[1]
    assert "rank 0 cannot take part" in errors[0]
    assert "bytes of shared memory: cgroup " in errors[0]
    assert f"{cgroup.path.name} has " in errors[0] and " bytes left (is the machine or " in errors[0]


def _fill(rank, port, cgroup):
    """Heaps grow until there is no more, on both ranks at once; then all goes on."""
    _make_group(rank, port, cgroup, 160 * MB)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    kept, refusal, refused = [], None, torch.zeros(1)
    while refused < 2:
        dist.barrier()
        try:
            kept.append(backend.allocate_tensor(MB, dtype=torch.float32, device=torch.device("cpu")))
        except dist.DistBackendError as error:
            refusal = str(error)
        dist.all_reduce(refused.fill_(float(refusal is not None)))
    tensor = kept[0].fill_(1)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return len(kept), tensor.mean().item(), refusal


def test_heaps_grow_to_the_end_of_memory_and_no_further(cgroup):
    (results,) = run_ranks(_forked, 1, _fill, cgroup, backend=None)
    for _, mean, refusal in results:
        assert mean == 2.0
        assert "no memory for 4194304 bytes of shared memory: cgroup " in refusal
    assert 20 <= sum(count for count, _, _ in results) < 40  # of 4 MB each, in 160 MB
