"""The backend torchtp over several hosts: every call right, and the same bits everywhere."""

import contextlib
import itertools
import os
import time

import pytest
import test_backend_callbacks as callbacks
import test_backend_collectives as moves
import test_backend_overlap as overlap
import test_exchange
import torch
import torch.distributed as dist
from models import make_layout, make_network
from torch.nn.parallel import DistributedDataParallel
from training import assert_same_parameters, loss_of, make_images, make_optimizer, train_single

import torchtp
from torchtp import _C
from torchtp.testing.namespaces import Hosts, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "hosts can be made")

Op = dist.ReduceOp
DTYPES = (torch.bool, torch.int8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.complex64)
NUMELS = (0, 5, 3001, 20_001)  # of fp32: the first ranks alone swap the second, not the third


@pytest.fixture(scope="module")
def made():
    every = {sizes: Hosts(sizes) for sizes in ((2, 2), (3, 1), (1, 1, 1))}
    yield every
    for each in every.values():
        each.close()


@pytest.fixture(params=[(2, 2), (3, 1), (1, 1, 1)], ids=lambda sizes: " + ".join(map(str, sizes)))
def hosts(request, made):
    return made[request.param]


@pytest.fixture
def pairs(made):
    return made[2, 2]


def _backend(group=None):
    return (group or dist.group.WORLD)._get_backend(torch.device("cpu"))


def _who_is_where():
    return _backend().hosts


def test_hosts_are_found_by_what_can_be_handed_over(hosts):
    # All ranks have the same host name, boot id and user, and each its own LOCAL_RANK.
    for found in hosts.run(_who_is_where):
        assert [len(host) for host in found] == list(hosts.sizes)
        assert [rank for host in found for rank in host] == list(range(sum(hosts.sizes)))


def _input(rank, numel, dtype):
    """Small whole numbers: every order of summing them is exact."""
    values = torch.arange(numel) * (rank + 3) % 5
    return (values > 1) if dtype == torch.bool else (values - (2 if dtype != torch.bool else 0)).to(dtype)


def _expected(inputs, op):
    dtype = inputs[0].dtype
    if dtype == torch.bool:
        stacked = torch.stack(inputs)
        return stacked.any(0) if op in (Op.SUM, Op.MAX) else stacked.all(0)
    wide = torch.stack([tensor.to(torch.complex128 if dtype.is_complex else torch.float64) for tensor in inputs])
    if op in (Op.SUM, Op.AVG):
        total = wide.sum(0)
        if op == Op.AVG:
            total = total / len(inputs)
            total = total if dtype.is_floating_point or dtype.is_complex else total.trunc()
        return total.to(dtype)
    return {Op.PRODUCT: wide.prod, Op.MIN: wide.amin, Op.MAX: wide.amax}[op](0).to(dtype)


def _ops(dtype):
    if dtype.is_complex:
        return (Op.SUM, Op.AVG)
    return (Op.SUM, Op.PRODUCT, Op.MIN, Op.MAX) if dtype == torch.bool else (Op.SUM, Op.AVG, Op.PRODUCT, Op.MIN, Op.MAX)


def _reductions():
    rank, size = dist.get_rank(), dist.get_world_size()
    for case, dtype in enumerate(DTYPES):
        for numel in NUMELS:
            inputs = [_input(r, numel, dtype) for r in range(size)]
            for index, op in enumerate(_ops(dtype)):
                expected = _expected(inputs, op)
                tensor = inputs[rank].clone()
                work = dist.all_reduce(tensor, op, async_op=bool((case + index) % 2))
                if work is not None:
                    work.wait()
                torch.testing.assert_close(tensor, expected, msg=lambda text, at=(dtype, numel, op): f"{at}: {text}")
            root = case % size
            tensor = inputs[rank].clone()
            dist.reduce(tensor, root)
            torch.testing.assert_close(tensor, _expected(inputs, Op.SUM) if rank == root else inputs[rank])
            whole = [torch.cat([_input(r + to, numel, dtype) for to in range(size)]) for r in range(size)]
            output = torch.empty(numel, dtype=dtype)
            dist.reduce_scatter_tensor(output, whole[rank], Op.SUM)
            mine = slice(rank * numel, (rank + 1) * numel)
            torch.testing.assert_close(output, _expected([each[mine] for each in whole], Op.SUM))


def test_memory_of_both_sides_of_a_call_over_hosts(pairs):
    pairs.run(overlap.overlapping)


def test_every_reduction_over_hosts(hosts):
    hosts.run(_reductions)


def _large():
    """Several blocks, with a ragged end; in the segment and out of it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    places = (torch.empty, lambda n: _backend().allocate_tensor(n, dtype=torch.float32, device=torch.device("cpu")))
    # One part of one block, a last block of one element, and several blocks.
    for numel, allocate in itertools.product((90_001, 786_433, 2_500_003), places):
        tensor = allocate(numel)
        tensor.copy_(_input(rank, numel, torch.float32))
        dist.all_reduce(tensor)
        assert torch.equal(tensor, _expected([_input(r, numel, torch.float32) for r in range(size)], Op.SUM))
        dist.broadcast(tensor.fill_(rank), size - 1)
        assert (tensor == size - 1).all()
    tensor = torch.randn(300_000, generator=torch.Generator().manual_seed(rank))
    for op in (Op.SUM, Op.AVG):
        for dtype in (torch.float32, torch.bfloat16):
            mine = tensor.to(dtype)
            dist.all_reduce(mine, op)
            everybody = [torch.empty_like(mine) for _ in range(size)]
            dist.all_gather(everybody, mine)
            assert all(torch.equal(each, mine) for each in everybody)  # the same bits on every rank


def test_large_reductions_over_hosts_give_the_same_bits_everywhere(hosts):
    hosts.run(_large)


def test_large_reductions_over_three_uneven_hosts():
    with contextlib.closing(Hosts((2, 1, 2))) as hosts:
        hosts.run(_reductions)
        hosts.run(_large)
        hosts.run(_large_without_room)


def _large_without_room():
    """The heaps of the first host are too small to work in: it goes another way, with the same messages."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank in _who_is_where()[0]:
        os.environ["TORCHTP_HEAP_BYTES"] = str(1 << 20)
    try:
        group = dist.new_group()
    finally:
        os.environ.pop("TORCHTP_HEAP_BYTES", None)
    numel = 2_500_003
    tensor = _input(rank, numel, torch.float32)
    dist.all_reduce(tensor, group=group)
    assert torch.equal(tensor, _expected([_input(r, numel, torch.float32) for r in range(size)], Op.SUM))
    dist.destroy_process_group(group)


def test_hosts_whose_heap_has_no_room_reduce_as_the_others(hosts):
    hosts.run(_large_without_room)


MOVES = [
    moves._broadcast,
    moves._all_gather,
    moves._unequal_lengths,
    moves._gather_and_scatter,
    moves._all_to_all,
    moves._coalesced,
    moves._objects,
    moves._barrier,
    moves._neighbours,
    moves._tags,
    moves._from_anyone,
    moves._send_beside_collectives,
    moves._futures_of_messages,
    moves._order,
]
CALLBACKS = [
    (callbacks._tensors,),
    (callbacks._callbacks_that_wait,),
    (callbacks._same_order, callbacks._attached_to_some),
    (callbacks._power_sgd_of_several_buckets,),
]


def _with_fewer_sizes(call):
    moves.NUMELS = (0, 5, 20_001)
    call()


@pytest.mark.parametrize("call", MOVES, ids=lambda call: call.__name__.strip("_"))
def test_bytes_arrive_over_hosts(hosts, call):
    hosts.run(_with_fewer_sizes, call)


@pytest.mark.parametrize("call", CALLBACKS, ids=lambda call: call[-1].__name__.strip("_"))
def test_callbacks_over_hosts(pairs, call):
    pairs.run(*call)


def _exchange(largest, steps):
    group = dist.new_group()
    test_exchange._everybody_to_everybody(_C.exchange_of(group.group_name), dist.barrier, largest, steps, 1)
    dist.barrier()
    dist.destroy_process_group(group)


def test_slabs_arrive_over_hosts(hosts):
    hosts.run(_exchange, 3000, 20)
    hosts.run(_exchange, 400_000, 4)


def _polled():
    rank, size = dist.get_rank(), dist.get_world_size()
    following, before = (rank + 1) % size, (rank - 1) % size
    for numel in (0, 3, 500_000):  # a large one goes when it has been asked for
        for source in (before, None):
            received = torch.zeros(numel)
            sent = dist.isend(torch.full((numel,), float(rank)), following)
            works = [dist.irecv(received, source), sent]
            deadline = time.monotonic() + 60
            while not all(work.is_completed() for work in works):
                assert time.monotonic() < deadline
            assert (received == before).all()
            for work in works:
                work.wait()
            dist.barrier()


def test_who_asks_for_messages_over_hosts_is_told_without_waiting(hosts):
    hosts.run(_polled)


def _futures():
    rank, size = dist.get_rank(), dist.get_world_size()
    following, before = (rank + 1) % size, (rank - 1) % size
    for numel in (3, 500_000):
        sent = dist.isend(torch.full((numel,), float(rank)), following).get_future()  # nobody receives it yet
        received = torch.zeros(numel)
        doubled = dist.irecv(received, before).get_future().then(lambda future: 2 * future.value()[0].sum())
        assert doubled.wait() == 2 * numel * before
        sent.wait()


def test_messages_over_hosts_have_futures(hosts):
    hosts.run(_futures)


def _of_two_types():
    group = dist.new_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    with pytest.raises(dist.DistBackendError, match=r"receives 16 bytes of fp32 .* sent 16 bytes of fp64"):
        if rank == 0:
            dist.send(torch.ones(2, dtype=torch.float64), size - 1, group=group)
        elif rank == size - 1:
            dist.recv(torch.ones(4), 0, group=group)
        dist.barrier(group)
    dist.destroy_process_group(group)


def test_messages_of_another_type_over_hosts_are_an_error_on_all_ranks(hosts):
    hosts.run(_of_two_types)


def _subgroups():
    """Of one rank a host, of one host, and of both; torchtp finds out for each."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for ranks in ([0, size - 1], [0, 1], list(range(size))):
        group = dist.new_group(ranks)
        if rank in ranks:
            tensor = torch.full((30_000,), float(rank + 1))
            dist.all_reduce(tensor, group=group)
            assert (tensor == sum(r + 1 for r in ranks)).all()
            dist.destroy_process_group(group)


def test_subgroups_over_hosts(hosts):
    hosts.run(_subgroups)


def _ddp():
    torch.manual_seed(0)
    single = torch.nn.Linear(300, 40, dtype=torch.float64)
    model = DistributedDataParallel(torch.nn.Linear(300, 40, dtype=torch.float64))
    model.module.load_state_dict(single.state_dict())
    inputs = torch.randn(4, 300, dtype=torch.float64)
    single(inputs).square().mean().backward()
    mine = inputs[dist.get_rank() :: dist.get_world_size()]
    model(mine).square().mean().backward()
    for ours, expected in zip(model.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, expected.grad, rtol=1e-9, atol=1e-12)


def _parallelize():
    layout = make_layout({"h": 2, "w": 2})
    single, _ = train_single("convnext", 2, 1)
    model = torchtp.parallelize(make_network("convnext"), layout)
    optimizer = make_optimizer(model)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model(make_images(step, 1))).backward()
        optimizer.step()
    assert_same_parameters(model, single)


@pytest.mark.parametrize("train", [_ddp, _parallelize])
def test_training_over_hosts_equals_one_rank(pairs, train):
    pairs.run(train, timeout=120)
