"""A rank whose process has reached a limit of its machine is one clear error on all ranks, or does without."""

import contextlib
import ctypes

import pytest
import torch
import torch.distributed as dist

from torchtp.testing import run_ranks


@contextlib.contextmanager
def broken(library, name):
    """The variable of the preloaded library is set in this process until the block ends."""
    variable = ctypes.c_int.in_dll(ctypes.CDLL(library), name)
    variable.value = 1
    try:
        yield
    finally:
        variable.value = 0


def _all_reduce(group):
    dist.all_reduce(torch.ones(3), group=group, async_op=True).wait()


def _isend(group):
    dist.isend(torch.ones(1_000_000), (dist.get_rank() + 1) % 3, group=group)
    dist.barrier(group)


def _without_threads(library, call):
    rank, group = dist.get_rank(), dist.new_group()
    with broken(library, "no_threads") if rank == 1 else contextlib.nullcontext():
        tensor = torch.ones(3)
        dist.all_reduce(tensor, group=dist.new_group())  # needs none
        assert (tensor == 3).all()
        with pytest.raises(dist.DistBackendError) as raised:
            call(group)
        with pytest.raises(dist.DistBackendError, match="rank 1 cannot start a thread"):
            dist.barrier(group)
        dist.destroy_process_group(group)
    return str(raised.value)


@pytest.mark.parametrize("call", [_all_reduce, _isend])
def test_a_rank_that_cannot_start_a_thread_is_the_error_of_all(preloaded, call):
    errors = run_ranks(_without_threads, 3, preloaded, call, backend="torchtp", fresh=True)
    assert len(set(errors)) == 1, errors
    assert "rank 1 cannot start a thread for what it does not wait for: Resource temporarily unavailable" in errors[0]


def _without_callers(library):
    with broken(library, "no_callers") if dist.get_rank() == 0 else contextlib.nullcontext():
        with pytest.raises(dist.DistBackendError) as raised:
            dist.new_group()
    return str(raised.value)


def test_a_rank_without_a_descriptor_for_its_callers_is_the_error_of_all(preloaded):
    errors = run_ranks(_without_callers, 3, preloaded, backend="torchtp", fresh=True)
    assert len(set(errors)) == 1, errors
    assert "rank 0 " in errors[0] and "cannot let a rank in: Too many open files" in errors[0]
