"""Calls on a device's tensors, which go to an inner backend: here gloo stands in for NCCL, and the CPU for the card.

`test_cuda_backend` runs the same bodies on a card, by making it the default device.
"""

import contextlib
import datetime
import functools
import os

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from torchtp.testing import run_ranks

Op = dist.ReduceOp


def on_card():
    return torch.get_default_device().type == "cuda"


@contextlib.contextmanager
def _inner_group(timeout=60):
    """A group whose tensors on the default device go to the inner backend."""
    if not on_card():
        os.environ["TORCHTP_TEST_INNER"] = "gloo"
    group = dist.new_group(timeout=datetime.timedelta(seconds=timeout))
    if not on_card():
        _backend(group)._set_inner_device("cpu")
    try:
        yield group
    finally:
        os.environ.pop("TORCHTP_TEST_INNER", None)
        dist.destroy_process_group(group)


def _backend(group):
    return group._get_backend(torch.get_default_device())


def _ours(rank, numel=6):
    return torch.arange(numel, dtype=torch.float32) + 10 * rank


def _reductions(group, rank, size, asynchronous):
    total = sum(_ours(r) for r in range(size))
    tensor = _ours(rank)
    yield dist.all_reduce(tensor, group=group, async_op=asynchronous), tensor, total
    tensor = _ours(rank)
    yield dist.all_reduce(tensor, Op.MAX, group=group, async_op=asynchronous), tensor, _ours(size - 1)
    tensor = _ours(rank)
    yield dist.reduce(tensor, 0, group=group, async_op=asynchronous), tensor if rank == 0 else total, total
    output = torch.empty(3)
    whole = torch.cat([_ours(r, 3) + rank for r in range(size)])
    expected = size * _ours(rank, 3) + sum(range(size))
    yield dist.reduce_scatter_tensor(output, whole, group=group, async_op=asynchronous), output, expected


def _moves(group, rank, size, asynchronous):
    everything = torch.cat([_ours(r) for r in range(size)])
    tensor = _ours(rank)
    yield dist.broadcast(tensor, size - 1, group=group, async_op=asynchronous), tensor, _ours(size - 1)
    outputs = [torch.empty(6) for _ in range(size)]
    work = dist.all_gather(outputs, _ours(rank), group=group, async_op=asynchronous)
    yield work, outputs, list(everything.split(6))
    output = torch.empty(6 * size)
    work = dist.all_gather_into_tensor(output, _ours(rank), group=group, async_op=asynchronous)
    yield work, output, everything
    outputs = [torch.empty(6) for _ in range(size)] if rank == 0 else None
    work = dist.gather(_ours(rank), outputs, 0, group=group, async_op=asynchronous)
    yield work, outputs, list(everything.split(6)) if rank == 0 else None
    output, inputs = torch.empty(6), [_ours(r) for r in range(size)] if rank == 0 else None
    yield dist.scatter(output, inputs, 0, group=group, async_op=asynchronous), output, _ours(rank)
    output, inputs = torch.empty(size), torch.arange(float(size)) + 10 * rank
    work = dist.all_to_all_single(output, inputs, group=group, async_op=asynchronous)
    yield work, output, 10 * torch.arange(float(size)) + rank
    yield dist.barrier(group, async_op=asynchronous), None, None


def _every_call(calls):
    rank, size = dist.get_rank(), dist.get_world_size()
    with _inner_group() as group:
        error, words = (TypeError, "Short") if on_card() else (RuntimeError, "scalar type")
        with pytest.raises(error, match=words):  # it is NCCL or gloo that answers, which has no such sum
            dist.all_reduce(torch.ones(2, dtype=torch.int16), group=group)
        for asynchronous in (False, True):
            for work, got, expected in calls(group, rank, size, asynchronous):
                assert (work is not None) == asynchronous
                if asynchronous:
                    work.wait()
                torch.testing.assert_close(got, expected, rtol=0, atol=0)
        before = _backend(group)._get_sequence_number_for_group()
        dist.all_reduce(torch.ones(1), group=group)
        assert _backend(group)._get_sequence_number_for_group() == before + 1


@pytest.mark.parametrize("calls", [_reductions, _moves])
def test_every_collective_goes_to_the_inner_backend(calls):
    run_ranks(_every_call, 2, calls, backend="torchtp")


def _norms():
    ops, rank = torch.ops.torchtp, dist.get_rank()
    full = torch.randn(2, 4, 6, 5, dtype=torch.float64)
    full.requires_grad_()
    part = full.detach()[:, :, 3 * rank : 3 * rank + 3].clone().requires_grad_()
    with _inner_group() as group:
        names = [group.group_name]
        for found, expected in (
            (ops.batch_norm(part, None, None, None, None, True, 0.1, 1e-5, names)[0], F.batch_norm(full, None, None, training=True)),
            (ops.group_norm(part, None, None, 2, 1e-5, names)[0], F.group_norm(full, 2)),
        ):  # fmt: skip
            torch.testing.assert_close(found, expected[:, :, 3 * rank : 3 * rank + 3])
            (mine,) = torch.autograd.grad((found**3).sum(), part)
            (whole,) = torch.autograd.grad((expected**3).sum(), full)
            torch.testing.assert_close(mine, whole[:, :, 3 * rank : 3 * rank + 3])


def test_norms_sum_over_the_ranks_of_a_device():
    run_ranks(_norms, 2, backend="torchtp")


def _futures_and_coalescing():
    rank, size = dist.get_rank(), dist.get_world_size()
    with _inner_group() as group:
        tensor = torch.full((1000,), float(rank + 1))
        future = dist.all_reduce(tensor, group=group, async_op=True).get_future()
        doubled = future.then(lambda done: done.value()[0] * 2).wait()
        assert (doubled == size * (size + 1)).all()
        tensors = [torch.full((numel,), float(rank + 1)) for numel in (3, 0, 7)]
        with dist._coalescing_manager(group=group, async_ops=True) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor, group=group)
        manager.wait()
        assert all((tensor == size * (size + 1) / 2).all() for tensor in tensors)
        received = torch.empty(5)
        operations = [
            dist.P2POp(dist.isend, torch.full((5,), float(rank)), (rank + 1) % size, group),
            dist.P2POp(dist.irecv, received, (rank - 1) % size, group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert (received == (rank - 1) % size).all()
        if rank == 0:
            dist.send(torch.full((4,), 7.0), 1, group=group)
        elif rank == 1:
            tensor = torch.empty(4)
            assert dist.recv(tensor, 0 if on_card() else None, group=group) == 0  # NCCL must know from whom
            assert (tensor == 7).all()


def test_futures_coalesced_calls_and_messages_work_on_a_device():
    run_ranks(_futures_and_coalescing, 2, backend="torchtp")


def _both_kinds():
    """Device and host calls in one group keep their common order, and what only torchtp can do is done where it can."""
    size = dist.get_world_size()
    with _inner_group() as group:
        for turn in range(6):
            _backend(group)._set_inner_device("cuda" if turn % 2 else "cpu")
            works = []
            tensors = [torch.full((numel,), float(dist.get_rank())) for numel in (10, 50_000)]
            for tensor in tensors:
                works.append(dist.all_reduce(tensor, group=group, async_op=True))
            for work in works:
                work.wait()
            assert all((tensor == size * (size - 1) / 2).all() for tensor in tensors)
            if turn % 2:
                tensor = torch.full((4,), float(dist.get_rank()))
                dist.all_reduce(tensor, Op.AVG, group=group)
                assert (tensor == (size - 1) / 2).all()


def test_tensors_of_the_device_and_of_the_host_share_a_group():
    run_ranks(_both_kinds, 2, backend="torchtp")


def _error_of(call):
    with pytest.raises(dist.DistBackendError) as caught:
        call()
    return str(caught.value)


def _other_device(first):
    with _inner_group(timeout=5) as group:
        if not first:
            dist.all_reduce(torch.ones(3), group=group)
        if dist.get_rank() == 1:
            _backend(group)._set_inner_device("cuda")
        return _error_of(lambda: [dist.all_reduce(torch.ones(3), group=group) for _ in range(2)])


@pytest.mark.parametrize("first", [True, False])
def test_ranks_that_differ_in_the_device_get_one_error(first):
    errors = run_ranks(_other_device, 2, first, backend="torchtp", fresh=True)
    assert errors[0] == errors[1]
    assert "3 elements, on a device)" in errors[0] and "3 elements)" in errors[0]


def _mismatch(call):
    with _inner_group(timeout=5) as group:
        return _error_of(lambda: call(dist.get_rank(), group))


def _shapes(rank, group):
    dist.all_reduce(torch.ones(3 + rank), group=group)


def _nobody_comes(rank, group):
    if rank == 0:
        options = dist.AllreduceOptions()
        options.timeout = datetime.timedelta(seconds=1)
        group.allreduce([torch.ones(3)], options).wait()
    else:
        raise dist.DistBackendError("came to nothing")


def test_calls_on_a_device_that_do_not_match_give_one_error():
    errors = run_ranks(_mismatch, 2, _shapes, backend="torchtp")
    assert errors[0] == errors[1]
    assert "3 elements" in errors[0] and "4 elements" in errors[0]


def test_a_rank_that_does_not_come_to_a_call_on_a_device_is_named():
    errors = run_ranks(_mismatch, 2, _nobody_comes, backend="torchtp", fresh=True)
    assert "rank 1" in errors[0] and "allreduce" in errors[0]


def _refused():
    with _inner_group() as group:
        if dist.get_rank() == 1:
            with pytest.raises(RuntimeError, match="BAND has no meaning"):
                dist.all_reduce(torch.ones(3), Op.BAND, group=group)
            return _error_of(lambda: dist.all_reduce(torch.ones(3), group=group))
        return _error_of(lambda: dist.all_reduce(torch.ones(3), group=group))


def test_a_call_on_a_device_that_one_rank_refuses_fails_on_the_others():
    errors = run_ranks(_refused, 2, backend="torchtp", fresh=True)
    assert all("which it refused itself" in error for error in errors)


def _aborted():
    with _inner_group(timeout=5) as group:
        dist.all_reduce(torch.ones(3), group=group)
        if dist.get_rank() == 0:
            _backend(group).abort()
        return _error_of(lambda: [dist.all_reduce(torch.ones(3), group=group) for _ in range(2)])


def test_abort_ends_calls_on_a_device():
    assert all("rank 0 called abort()" in error for error in run_ranks(_aborted, 2, backend="torchtp", fresh=True))


def _step(wrap):
    torch.manual_seed(0)
    model = wrap(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
    parameters = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return [p.detach().clone() for p in parameters]


def _sharded(model, mesh):
    fully_shard(model, mesh=mesh).set_force_sum_reduction_for_comms(True)  # without AVG
    return model


def _training():
    gloo = dist.new_group(backend="gloo")
    expected = _step(functools.partial(DistributedDataParallel, process_group=gloo))
    with _inner_group() as group:
        torch.testing.assert_close(_step(functools.partial(DistributedDataParallel, process_group=group)), expected)
        sharded = functools.partial(_sharded, mesh=DeviceMesh.from_group(group, torch.get_default_device().type))
        torch.testing.assert_close(_step(sharded), expected)


def test_ddp_and_fsdp_train_on_a_device():
    run_ranks(_training, 2, backend="torchtp", timeout=120)


@pytest.mark.skipif(dist.is_nccl_available(), reason="this PyTorch has NCCL")
def test_a_torch_without_nccl_says_so():
    with pytest.raises(Exception, match="by NCCL, and this PyTorch was built without it"):
        run_ranks(_inner_device, 1, backend="torchtp")


def _inner_device():
    _backend(dist.group.WORLD)._set_inner_device("cpu")
