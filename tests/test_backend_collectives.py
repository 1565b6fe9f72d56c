"""The collectives of the backend torchtp that move bytes, and point-to-point messages."""

import functools

import pytest
import torch
import torch.distributed as dist

from torchtp.testing import run_ranks

DTYPES = (torch.bool, torch.int8, torch.int64, torch.bfloat16, torch.float64, torch.complex64)
NUMELS = (0, 5, 20_001, 400_001)  # of fp64: the last is 3.2 MB, several slots


def _input(rank, numel, dtype):
    generator = torch.Generator().manual_seed(1000 * rank + numel)
    return torch.randint(0, 2 if dtype == torch.bool else 100, (numel,), generator=generator).to(dtype)


def _empty(numel, dtype, contiguous):
    if contiguous:
        return torch.empty(numel, dtype=dtype)
    return torch.empty(numel, 2, dtype=dtype)[:, 0]


def _filled(tensor, contiguous):
    return _empty(tensor.numel(), tensor.dtype, contiguous).copy_(tensor)


def _cases():
    for numel in NUMELS:
        for index, dtype in enumerate(DTYPES):
            contiguous = bool((numel + index) % 2)
            yield numel, dtype, contiguous, bool((numel + index) % 3)


def _run(call, *args, asynchronous, **kwargs):
    work = call(*args, async_op=asynchronous, **kwargs)
    if asynchronous:
        work.wait()


def _broadcast():
    rank, size = dist.get_rank(), dist.get_world_size()
    for numel, dtype, contiguous, asynchronous in _cases():
        for root in range(size):
            tensor = _filled(_input(rank, numel, dtype), contiguous)
            _run(dist.broadcast, tensor, root, asynchronous=asynchronous)
            assert torch.equal(tensor, _input(root, numel, dtype)), (numel, dtype, root)


def _all_gather():
    rank, size = dist.get_rank(), dist.get_world_size()
    for numel, dtype, contiguous, asynchronous in _cases():
        inputs = [_input(r, numel, dtype) for r in range(size)]
        outputs = [_empty(numel, dtype, contiguous) for _ in range(size)]
        _run(dist.all_gather, outputs, _filled(inputs[rank], contiguous), asynchronous=asynchronous)
        assert all(map(torch.equal, outputs, inputs)), (numel, dtype)
        output = torch.empty(size * numel, dtype=dtype)
        _run(dist.all_gather_into_tensor, output, inputs[rank], asynchronous=asynchronous)
        assert torch.equal(output, torch.cat(inputs)), (numel, dtype)
        mine = output[rank * numel : (rank + 1) * numel]  # in place, as FSDP does
        output.zero_()
        mine.copy_(inputs[rank])
        _run(dist.all_gather_into_tensor, output, mine, asynchronous=asynchronous)
        assert torch.equal(output, torch.cat(inputs)), (numel, dtype)


def _unequal_lengths():
    """Lists whose tensors differ in length; whole numbers, so that every order of summing them is exact."""
    rank, size = dist.get_rank(), dist.get_world_size()
    longest = 60_000
    for lengths in (
        list(range(size)),
        [(longest, 0, 7, 1)[r] for r in range(size)],
        [longest + 9 * r for r in range(size)],
    ):
        for index, dtype in enumerate(DTYPES[1:]):
            contiguous, asynchronous = bool(index % 2), bool(index % 3)
            inputs = [_input(r, n, dtype) for r, n in enumerate(lengths)]
            outputs = [_empty(n, dtype, contiguous) for n in lengths]
            _run(dist.all_gather, outputs, _filled(inputs[rank], not contiguous), asynchronous=asynchronous)
            assert all(map(torch.equal, outputs, inputs)), (lengths, dtype)
            values = torch.arange(longest + 9 * size) % 3
            pieces = [_filled((values[:n] + rank).to(dtype), contiguous) for n in lengths]
            kept = [piece.clone() for piece in pieces]
            output = _empty(lengths[rank], dtype, not contiguous)
            expected = (values[: lengths[rank]] * size + sum(range(size))).to(dtype)
            _run(dist.reduce_scatter, output, pieces, asynchronous=asynchronous)
            assert torch.equal(output, expected), (lengths, dtype)
            assert all(map(torch.equal, pieces, kept)), (lengths, dtype)
            _run(dist.reduce_scatter, pieces[rank], pieces, asynchronous=asynchronous)
            assert torch.equal(pieces[rank], expected), (lengths, dtype)


def _gather_and_scatter():
    rank, size = dist.get_rank(), dist.get_world_size()
    for numel, dtype, contiguous, asynchronous in _cases():
        inputs = [_input(r, numel, dtype) for r in range(size)]
        for root in range(size):
            outputs = [_empty(numel, dtype, contiguous) for _ in range(size)] if rank == root else None
            _run(dist.gather, _filled(inputs[rank], contiguous), outputs, root, asynchronous=asynchronous)
            assert rank != root or all(map(torch.equal, outputs, inputs)), (numel, dtype, root)
            output = _empty(numel, dtype, contiguous)
            pieces = [_filled(tensor, contiguous) for tensor in inputs] if rank == root else None
            _run(dist.scatter, output, pieces, root, asynchronous=asynchronous)
            assert torch.equal(output, inputs[rank]), (numel, dtype, root)


def _all_to_all():
    rank, size = dist.get_rank(), dist.get_world_size()

    def message(source, target, numel, dtype):
        return _input(10 * source + target, numel, dtype)

    for numel, dtype, contiguous, asynchronous in _cases():
        inputs = [_filled(message(rank, r, numel, dtype), contiguous) for r in range(size)]
        outputs = [_empty(numel, dtype, contiguous) for _ in range(size)]
        expected = [message(r, rank, numel, dtype) for r in range(size)]
        _run(dist.all_to_all, outputs, inputs, asynchronous=asynchronous)
        assert all(map(torch.equal, outputs, expected)), (numel, dtype)
        output = torch.empty(size * numel, dtype=dtype)
        _run(dist.all_to_all_single, output, torch.cat(inputs), asynchronous=asynchronous)
        assert torch.equal(output, torch.cat(expected)), (numel, dtype)
        # Rank s sends s + d rows of two elements to rank d: some nothing, all different amounts.
        to = [(rank + r) * numel // 4 for r in range(size)]
        inputs = [message(rank, r, 2 * rows, dtype).view(rows, 2) for r, rows in enumerate(to)]
        output = torch.empty(sum(to), 2, dtype=dtype)
        _run(dist.all_to_all_single, output, torch.cat(inputs), to, to, asynchronous=asynchronous)
        expected = [message(r, rank, 2 * rows, dtype).view(rows, 2) for r, rows in enumerate(to)]
        assert torch.equal(output, torch.cat(expected)), (numel, dtype)


def _coalesced():
    rank, size = dist.get_rank(), dist.get_world_size()
    numels = (4, 0, 20_001)
    inputs = [[_input(r, numel, torch.float32) for numel in numels] for r in range(size)]
    outputs = [torch.empty(size * numel) for numel in numels]
    with dist._coalescing_manager():
        for output, tensor in zip(outputs, inputs[rank], strict=True):
            dist.all_gather_into_tensor(output, tensor)
    for i, output in enumerate(outputs):
        assert torch.equal(output, torch.cat([inputs[r][i] for r in range(size)]))
    parts = [torch.empty(numel) for numel in numels]
    with dist._coalescing_manager(async_ops=True) as manager:
        for part, output in zip(parts, outputs, strict=True):
            dist.reduce_scatter_tensor(part, output)
    manager.wait()
    assert all(torch.equal(part, size * tensor) for part, tensor in zip(parts, inputs[rank], strict=True))
    lists = [[torch.empty(numel) for numel in numels] for _ in range(size)]
    dist.all_gather_coalesced(lists, inputs[rank])
    assert all(torch.equal(lists[r][i], inputs[r][i]) for r in range(size) for i in range(len(numels)))


def _coalesced_tensors_that_share_memory():
    rank, size = dist.get_rank(), dist.get_world_size()
    total = size * (size - 1) / 2
    for asynchronous in (False, True):
        memory = torch.full((6,), float(rank))
        twice = memory[:2]
        work = dist.all_reduce_coalesced([twice, twice, memory[3:5], memory[4:]], async_op=asynchronous)
        if asynchronous:
            work.wait()
        assert memory.tolist() == [total, total, rank, total, total, total]
        with dist._coalescing_manager():
            dist.all_reduce(twice)
            dist.all_reduce(twice)
        assert twice.tolist() == [size * total] * 2


def _objects():
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = {"rank": rank, "padding": "x" * 1000 * rank}
    expected = [{"rank": r, "padding": "x" * 1000 * r} for r in range(size)]
    gathered = [None] * size
    dist.all_gather_object(gathered, mine)
    assert gathered == expected
    gathered = [None] * size if rank == 0 else None
    dist.gather_object(mine, gathered)
    assert rank != 0 or gathered == expected
    received = [mine]
    dist.broadcast_object_list(received, src=size - 1)
    assert received == [expected[-1]]
    received = [None]
    dist.scatter_object_list(received, expected if rank == 0 else [None] * size)
    assert received == [mine]


def _barrier():
    dist.barrier()
    dist.barrier(async_op=True).wait()
    if not torch.cuda.is_available():
        dist.barrier(device_ids=[dist.get_rank()])
    dist.group.WORLD.monitored_barrier()


@pytest.mark.parametrize(
    "collective",
    [
        _broadcast,
        _all_gather,
        _unequal_lengths,
        _gather_and_scatter,
        _all_to_all,
        _coalesced,
        _coalesced_tensors_that_share_memory,
        _objects,
        _barrier,
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_bytes_arrive_where_they_belong(collective, size):
    run_ranks(collective, size, backend="torchtp")


def _neighbours():
    rank, size = dist.get_rank(), dist.get_world_size()
    following, previous = (rank + 1) % size, (rank - 1) % size
    for numel, dtype, contiguous, _ in _cases():
        received = _empty(numel, dtype, contiguous)
        sent = _filled(_input(rank, numel, dtype), contiguous)
        ops = [dist.P2POp(dist.isend, sent, following), dist.P2POp(dist.irecv, received, previous)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert torch.equal(received, _input(previous, numel, dtype)), (numel, dtype)
    # A pair sends first and receives afterwards: more than any buffer between them holds.
    sent, received = torch.full((2_000_000,), float(rank)), torch.empty(2_000_000)
    work = dist.isend(sent, following)
    dist.recv(received, previous)
    work.wait()
    assert (received == previous).all()


def _tags():
    rank = dist.get_rank()
    if rank == 0:
        works = [dist.isend(torch.full((1000,), float(tag)), 1, tag=tag) for tag in (3, 1, 2)]
        for work in works:
            work.wait()
    elif rank == 1:
        for tag in (1, 2, 3):
            tensor = torch.empty(1000)
            assert dist.recv(tensor, 0, tag=tag) == 0
            assert (tensor == tag).all()


def _from_anyone():
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank != 0:
        dist.send(torch.full((100,), float(rank)), 0)
        return
    senders = []
    for _ in range(size - 1):
        tensor = torch.empty(100)
        senders.append(dist.recv(tensor))
        assert (tensor == senders[-1]).all()
    assert sorted(senders) == list(range(1, size))


def _send_beside_collectives():
    """An unfinished isend does not stop the collectives between it and its receive."""
    rank = dist.get_rank()
    tensor = torch.full((3_000_000,), float(rank))
    work = dist.isend(tensor, 1) if rank == 0 else None
    dist.barrier()
    dist.all_reduce(torch.ones(100_000))
    if rank == 1:
        dist.recv(tensor, 0)
        assert (tensor == 0).all()
    dist.barrier()
    if work is not None:
        work.wait()


def _futures_of_messages():
    rank = dist.get_rank()
    if rank > 1:
        return
    tensor = torch.full((1_000_000,), float(rank))
    work = dist.isend(tensor, 1) if rank == 0 else dist.irecv(tensor, 0)
    (result,) = work.get_future().wait()
    assert work.is_completed()
    assert (result == 0).all()


@pytest.mark.parametrize("talk", [_neighbours, _tags, _from_anyone, _send_beside_collectives, _futures_of_messages])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_messages_arrive_at_their_receive(talk, size):
    run_ranks(talk, size, backend="torchtp")


def _order():
    """Synchronous calls come after the asynchronous ones before them, whatever the ranks' speeds."""
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    tensors = [torch.full((numel,), float(rank)) for numel in (10, 100_000, 1000) * 8]
    works = []
    for index, tensor in enumerate(tensors):
        skew = int(torch.randint(0, 200, (), generator=generator))
        functools.reduce(lambda a, b: a @ b, [torch.eye(24)] * (skew + 1))
        if index % 3 == 2:
            dist.all_reduce(tensor)
        else:
            works.append(dist.all_reduce(tensor, async_op=True))
    for work in works:
        work.wait()
    assert all((tensor == size * (size - 1) / 2).all() for tensor in tensors)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_works_complete_in_order(size):
    run_ranks(_order, size, backend="torchtp")


def _into_shared_outputs():
    rank, size = dist.get_rank(), dist.get_world_size()
    buffer, long = torch.zeros(4), torch.zeros(2 * size + 2)
    dist.all_gather([buffer] * size, torch.full((4,), rank + 1.0))
    dist.all_gather([long[2 * r : 2 * r + 4] for r in range(size)], torch.full((4,), rank + 1.0))
    sent = torch.zeros(4)
    dist.all_to_all([sent] * size, [torch.full((4,), 10.0 * rank + to) for to in range(size)])
    columns = torch.zeros(5, size)
    dist.all_gather(list(columns.unbind(1)), torch.full((5,), rank + 1.0))
    return buffer, long, sent, columns


@pytest.mark.parametrize("size", [2, 3])
def test_outputs_that_share_memory_hold_what_the_last_got(size):
    results = run_ranks(_into_shared_outputs, size, backend="torchtp")
    for rank, (buffer, long, sent, columns) in enumerate(results):
        torch.testing.assert_close(buffer, torch.full((4,), float(size)))
        torch.testing.assert_close(long[: 2 * size], torch.arange(1.0, size + 1).repeat_interleave(2))
        torch.testing.assert_close(sent, torch.full((4,), 10.0 * (size - 1) + rank))
        torch.testing.assert_close(columns, torch.arange(1.0, size + 1).expand(5, size))
