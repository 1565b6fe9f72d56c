"""A rank whose process has reached a limit of its machine is one clear error on all ranks, or does without."""

import contextlib
import os
import resource

import pytest
import torch
import torch.distributed as dist
from address_space import address_space
from forked import forked, served_store
from preloading import broken

from torchtp.testing import run_ranks


def _all_reduce(group):
    dist.all_reduce(torch.ones(3), group=group, async_op=True).wait()


def _isend(group):
    dist.isend(torch.ones(1_000_000), (dist.get_rank() + 1) % 3, group=group)
    dist.barrier(group)


def _without_threads(library):
    told = []
    for call in (_all_reduce, _isend):
        group = dist.new_group()
        with broken(library, "no_threads") if dist.get_rank() == 1 else contextlib.nullcontext():
            tensor = torch.ones(3)
            dist.all_reduce(tensor, group=dist.new_group())  # needs none
            assert (tensor == 3).all()
            with pytest.raises(dist.DistBackendError) as raised:
                call(group)
            with pytest.raises(dist.DistBackendError, match="rank 1 cannot start a thread"):
                dist.barrier(group)
            dist.destroy_process_group(group)
        told.append(str(raised.value).split(": ", 1)[1])
    return told


def test_a_rank_that_cannot_start_a_thread_is_the_error_of_all(preloaded):
    told = run_ranks(_without_threads, 3, preloaded, backend="torchtp", fresh=True)
    (error,) = {error for errors in told for error in errors}
    assert "rank 1 cannot start a thread for what it does not wait for: Resource temporarily unavailable" in error


def _with_descriptors(rank, port, victim, left):
    """The victim has `left` descriptors while the group is made."""
    store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
    if rank == victim:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 20, hard))
        taken = []
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        for descriptor in taken[:left]:
            os.close(descriptor)
    dist.init_process_group("torchtp", store=store, rank=rank, world_size=3)


def _few_descriptors(victim, left):
    with served_store() as (_, port):
        return forked(3, _with_descriptors, port, victim, left)


@pytest.mark.parametrize(
    "victim, left, what",
    [
        (0, 1, "cannot make an anonymous file (memfd_create): Too many open files"),
        (0, 2, "cannot let a rank in: Too many open files"),
        (1, 1, "cannot make a UNIX socket: Too many open files"),
        (1, 2, "it has no descriptor left to take the segment with (ulimit -n)"),
    ],
)
def test_a_rank_with_few_descriptors_is_the_error_of_all(victim, left, what):
    (errors,) = run_ranks(_few_descriptors, 1, victim, left, backend=None)
    assert errors == [f"torchtp: rank {victim} cannot find out who is on its host: {what}"] * 3


def _without_memory():
    group, tensor = dist.new_group(), torch.ones(4096, 4096).t()  # of which a call needs a copy
    little = address_space(8 << 20) if dist.get_rank() == 1 else contextlib.nullcontext()
    with little, pytest.raises(RuntimeError) as raised:
        dist.all_reduce(tensor, group=group)
    with pytest.raises(dist.DistBackendError, match="rank 1 failed in call #0"):
        dist.barrier(group)
    dist.barrier()
    return str(raised.value)


def test_a_rank_that_has_no_memory_for_a_copy_is_the_error_of_all():
    errors = run_ranks(_without_memory, 3, backend="torchtp", fresh=True)
    for rank, error in enumerate(errors):
        assert ("rank 1 failed in call #0: " in error) == (rank != 1)
        assert "can't allocate memory" in error
