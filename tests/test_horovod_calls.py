"""The calls of Horovod's face that `test_horovod.py` has not, against closed formulas."""

import pytest
import torch

import torchtp.horovod as hvd
from torchtp.testing import run_ranks

SIZE = 3


def _averages():
    hvd.init()
    x = torch.full((2, 3), hvd.rank() + 1.0)
    whole = torch.full((2,), hvd.rank() + 3)
    in_place = x.clone()
    hvd.synchronize(hvd.allreduce_async_(in_place, False))
    summed, mean = [hvd.allreduce(x, False), hvd.allreduce(x, average=False), in_place], []
    summed += [hvd.allreduce(x, op=hvd.Sum), hvd.allreduce(x, None, "named", hvd.Compression.none, hvd.Sum)]
    summed += [hvd.allreduce_(x.clone(), False), hvd.synchronize(hvd.allreduce_async(x, False))]
    summed += [hvd.grouped_allreduce([x, x], False)[1]]
    mean += [hvd.allreduce(x, True), hvd.allreduce(x), hvd.allreduce(x, name="named")]
    mean += [hvd.allreduce(x, prescale_factor=0.5, postscale_factor=2.0)]
    parameter = torch.nn.Parameter(x.clone())
    threes = [hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.25, postscale_factor=2.0), hvd.allreduce(x, op=hvd.Max)]
    threes += [hvd.allreduce_(parameter, False, postscale_factor=0.5)]
    cut_off = [hvd.allreduce(whole, False, prescale_factor=0.5)]  # 1.5, 2.0 and 2.5, before they are added
    doubled = [hvd.allreduce(whole, False, postscale_factor=2.0)]
    return {6.0: summed, 2.0: mean, 3.0: threes, 5: cut_off, 24: doubled}


@pytest.mark.parametrize("backend", ["gloo", "torchtp"])
def test_average_and_factors_mean_what_they_do_in_horovod(backend):
    for results in run_ranks(_averages, SIZE, backend=backend):
        for value, tensors in results.items():
            assert [tensor.unique().tolist() for tensor in tensors] == [[value]] * len(tensors)


def _grouped():
    hvd.init()
    rank = hvd.rank()
    tensors = [torch.full((2,), rank + 1.0), torch.tensor(rank), torch.full((1, 2), rank + 1.0).half()]
    before = [tensor.clone() for tensor in tensors]
    out = hvd.grouped_allreduce(tensors, op=hvd.Sum)
    later = hvd.synchronize(hvd.grouped_allreduce_async(tensors, op=hvd.Max))
    assert all(map(torch.equal, tensors, before))
    assert hvd.grouped_allreduce([]) == []
    same = hvd.grouped_allreduce_(tensors, op=hvd.Sum)
    assert all(a is b for a, b in zip(same, tensors, strict=True))
    handle = hvd.grouped_allreduce_async_(before, op=hvd.Sum)
    hvd.synchronize(handle)
    assert hvd.poll(handle)
    return [[t.tolist() for t in each] for each in (out, later, tensors, before, hvd.synchronize(handle))]


@pytest.mark.parametrize("backend", ["gloo", "torchtp"])
def test_several_tensors_are_reduced_together(backend):
    sums, largest = [[6, 6], 3, [[6, 6]]], [[3, 3], 2, [[3, 3]]]
    assert run_ranks(_grouped, SIZE, backend=backend) == [[sums, largest, sums, sums, sums]] * SIZE


def _scattered(rows):
    hvd.init()
    x = torch.arange(2.0 * rows).view(rows, 2) * (hvd.rank() + 1)
    whole = torch.arange(rows) + hvd.rank()
    return (
        hvd.reducescatter(x).tolist(),
        hvd.synchronize(hvd.reducescatter_async(x, op=hvd.Sum, postscale_factor=0.5)).tolist(),
        hvd.reducescatter(whole, op=hvd.Min).tolist(),
        hvd.reducescatter(whole).tolist(),
        hvd.reducescatter(x * 30000, compression=hvd.Compression.fp16).dtype,
    )


@pytest.mark.parametrize("backend", ["gloo", "torchtp"])
@pytest.mark.parametrize("rows", [0, 2, 3, 7])
def test_each_rank_gets_its_rows_of_a_reduction(backend, rows):
    x, whole = torch.arange(2.0 * rows).view(rows, 2), torch.arange(rows)
    for rank, results in enumerate(run_ranks(_scattered, SIZE, rows, backend=backend)):
        mine = slice(None) if not rows else torch.arange(rows).tensor_split(SIZE)[rank]
        mean, half, least, floor, dtype = results
        assert mean == (2 * x)[mine].tolist() and half == (3 * x)[mine].tolist()
        assert least == whole[mine].tolist() and floor == (whole + 1)[mine].tolist()
        assert dtype == torch.float32


def _alltoall():
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    even = torch.arange(2 * size).view(2 * size, 1) + 100 * rank
    splits = [rank, 0, 2]  # rows for each rank
    uneven = torch.full((rank + 2, 2), float(rank))
    both = [hvd.alltoall(uneven, splits), hvd.synchronize(hvd.alltoall_async(uneven, torch.tensor(splits)))]
    nothing = hvd.alltoall(torch.zeros(0, 2), [0, 0, 0])
    return (
        hvd.alltoall(even).flatten().tolist(),
        [(rows.tolist(), counts.tolist(), counts.dtype) for rows, counts in both],
        (nothing[0].shape, nothing[1].tolist()),
    )


@pytest.mark.parametrize("backend", ["gloo", "torchtp"])
def test_rows_go_to_the_ranks_they_are_for(backend):
    for rank, (even, both, nothing) in enumerate(run_ranks(_alltoall, SIZE, backend=backend)):
        assert even == [100 * source + 2 * rank + row for source in range(SIZE) for row in range(2)]
        counts = [[source, 0, 2][rank] for source in range(SIZE)]
        rows = [[float(source)] * 2 for source in range(SIZE) for _ in range(counts[source])]
        assert both == [(rows, counts, torch.int32)] * 2
        assert nothing == ((0, 2), [0, 0, 0])


def _moved():
    hvd.init()
    rank = hvd.rank()
    x = torch.full((2,), float(rank))
    gathering, broadcasting = hvd.allgather_async(x), hvd.broadcast_async(x, 2)
    into = x.clone()
    filling = hvd.broadcast_async_(into, 1)
    gathered, root = hvd.synchronize(gathering), hvd.synchronize(broadcasting)
    assert hvd.synchronize(filling) is into
    assert x.tolist() == [rank, rank]
    everywhere = (hvd.cross_size(), hvd.is_homogeneous(), hvd.mpi_built(), hvd.mpi_enabled(), hvd.gloo_enabled())
    everywhere += (hvd.mpi_threads_supported(), hvd.ddl_built(), hvd.ccl_built(), hvd.gloo_built())
    return (
        gathered.tolist(),
        root.tolist(),
        into.tolist(),
        hvd.allgather(torch.zeros(0, 2)).shape,
        hvd.allgather_object(obj={"rank": rank}),
        everywhere,
    )


@pytest.mark.parametrize("backend", ["gloo", "torchtp"])
def test_tensors_and_objects_are_gathered_and_broadcast(backend):
    everywhere = (1, True, False, False, backend == "gloo", False, False, False, True)
    objects = [{"rank": rank} for rank in range(SIZE)]
    for result in run_ranks(_moved, SIZE, backend=backend):
        assert result == ([0, 0, 1, 1, 2, 2], [2, 2], [1, 1], (0, 2), objects, everywhere)


def _conjugated():
    hvd.init()
    made = torch.full((SIZE, 2), hvd.rank() + 1j, dtype=torch.complex128)
    in_place = made.clone()
    returned = hvd.broadcast_(in_place.conj(), 1)
    return hvd.alltoall(made.conj()), returned, in_place, hvd.broadcast(made.conj(), 1), hvd.allgather(made.conj())


def test_what_is_conjugated_when_it_is_read_travels_as_it_reads():
    rows = torch.arange(SIZE).to(torch.complex128).view(-1, 1) - 1j
    ones = torch.ones(SIZE, 2, dtype=torch.complex128)
    wanted = rows * ones, (1 - 1j) * ones, (1 + 1j) * ones, (1 - 1j) * ones, rows.repeat_interleave(SIZE, 0) * ones[:1]
    for found in run_ranks(_conjugated, SIZE, backend="torchtp"):
        torch.testing.assert_close(found, wanted)
