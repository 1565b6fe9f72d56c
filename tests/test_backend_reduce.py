"""allreduce, reduce and reduce_scatter of the backend torchtp: bit for bit the sum in rank order."""

import functools
import operator

import pytest
import torch
import torch.distributed as dist

from torchtp.testing import run_ranks

Op = dist.ReduceOp
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
# One round; staged in one chunk; staged in several chunks with a ragged end (of fp32: 20 B, 80 KB, 2.4 MB).
NUMELS = (0, 5, 20_001, 600_001)


def _input(rank, numel, dtype):
    generator = torch.Generator().manual_seed(1000 * rank + numel)
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        return torch.randn(numel, dtype=wide, generator=generator).to(dtype)
    if dtype == torch.bool:
        return torch.rand(numel, generator=generator) < 0.5
    return torch.randint(0, 100, (numel,), generator=generator).to(dtype)


def _reduced(inputs, op):
    """The meaning: in rank order, 16-bit floats in fp32."""
    dtype = inputs[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    if op == Op.AVG and not dtype.is_floating_point and not dtype.is_complex:
        wide = torch.int64
    inputs = [tensor.to(wide) for tensor in inputs]
    if dtype == torch.bool:
        pair = {Op.SUM: operator.or_, Op.MAX: operator.or_, Op.BOR: operator.or_, Op.BXOR: operator.xor}
        return functools.reduce(pair.get(op, operator.and_), inputs)
    pair = {
        Op.SUM: operator.add,
        Op.AVG: operator.add,
        Op.PRODUCT: operator.mul,
        Op.MIN: torch.minimum,
        Op.MAX: torch.maximum,
        Op.BAND: operator.and_,
        Op.BOR: operator.or_,
        Op.BXOR: operator.xor,
    }[op]
    total = functools.reduce(pair, inputs)
    if op == Op.AVG:
        total = total / len(inputs) if wide.is_floating_point or wide.is_complex else total // len(inputs)
    return total.to(dtype)


def _ops(dtype):
    if dtype == torch.bool:
        return (Op.SUM, Op.PRODUCT, Op.MIN, Op.MAX, Op.BAND, Op.BOR, Op.BXOR)
    if dtype.is_complex:
        return (Op.SUM, Op.AVG)  # torch.distributed refuses the others
    arithmetic = (Op.SUM, Op.AVG, Op.PRODUCT, Op.MIN, Op.MAX)
    return arithmetic if dtype.is_floating_point else (*arithmetic, Op.BAND, Op.BOR, Op.BXOR)


def _check(result, expected, what):
    if result.dtype.is_complex:  # the compiler may contract a * b + c * d
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6, msg=lambda text: f"{what}: {text}")
    else:
        assert torch.equal(result, expected), what


def _run(call, asynchronous):
    work = call(async_op=asynchronous)
    if asynchronous:
        work.wait()


def _sparse_rows(tensor):
    """The same elements in a tensor that is not contiguous."""
    holder = torch.zeros(tensor.numel(), 3, dtype=tensor.dtype)
    holder[:, 1] = tensor
    return holder[:, 1]


def _all_reduce():
    rank, size = dist.get_rank(), dist.get_world_size()
    dtypes = (torch.bool, *INTEGERS, *FLOATS, *COMPLEX)
    cases = [(numel, dtype) for numel in NUMELS[:3] for dtype in dtypes]
    for numel, dtype in [*cases, (NUMELS[3], torch.float32), (NUMELS[3], torch.bfloat16)]:
        inputs = [_input(r, numel, dtype) for r in range(size)]
        for index, op in enumerate(_ops(dtype)):
            expected = _reduced(inputs, op)
            for layout in (torch.clone, _sparse_rows):
                tensor = layout(inputs[rank])
                _run(functools.partial(dist.all_reduce, tensor, op), asynchronous=bool(index % 2))
                _check(tensor, expected, (numel, dtype, op, layout))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_all_reduce_is_the_sum_in_rank_order(size):
    run_ranks(_all_reduce, size, backend="torchtp")


def _reduce(dtype):
    rank, size = dist.get_rank(), dist.get_world_size()
    for numel in NUMELS:
        inputs = [_input(r, numel, dtype) for r in range(size)]
        for root in range(size):
            for asynchronous in (False, True):
                tensor = inputs[rank].clone()
                _run(functools.partial(dist.reduce, tensor, root), asynchronous)
                _check(tensor, _reduced(inputs, Op.SUM) if rank == root else inputs[rank], (numel, root))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_reduce_leaves_the_result_on_the_root_and_the_others_alone(size):
    for dtype in (torch.float32, torch.int64, torch.float16):
        run_ranks(_reduce, size, dtype, backend="torchtp")


def _reduce_scatter(dtype):
    rank, size = dist.get_rank(), dist.get_world_size()
    for numel in NUMELS:
        inputs = [_input(r, size * numel, dtype) for r in range(size)]
        for index, op in enumerate(_ops(dtype)):
            asynchronous = bool(index % 2)
            expected = _reduced(inputs, op)[rank * numel : (rank + 1) * numel]
            output = torch.empty(numel, dtype=dtype)
            _run(functools.partial(dist.reduce_scatter_tensor, output, inputs[rank].clone(), op), asynchronous)
            _check(output, expected, ("tensor", numel, op))
            for layout in (torch.clone, _sparse_rows):
                output = layout(torch.empty(numel, dtype=dtype))
                pieces = [layout(piece) for piece in inputs[rank].view(size, numel)]
                _run(functools.partial(dist.reduce_scatter, output, pieces, op), asynchronous)
                _check(output, expected, ("list", numel, op, layout))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_reduce_scatter_gives_every_rank_its_part(size):
    for dtype in (torch.float32, torch.bfloat16, torch.int32, torch.complex64):
        run_ranks(_reduce_scatter, size, dtype, backend="torchtp")


def _average_of_narrow_integers():
    tensor = torch.full((9,), 120, dtype=torch.int8)
    dist.all_reduce(tensor, Op.AVG)
    assert (tensor == 120).all()


def test_an_average_of_narrow_integers_does_not_overflow():
    run_ranks(_average_of_narrow_integers, 3, backend="torchtp")


def _extremes_keep_nan():
    rank, size = dist.get_rank(), dist.get_world_size()
    for op in (Op.MIN, Op.MAX):
        for nan_rank in range(size):
            tensor = torch.full((5,), float("nan") if rank == nan_rank else float(rank))
            dist.all_reduce(tensor, op)
            assert tensor.isnan().all(), (op, nan_rank)


@pytest.mark.parametrize("size", [2, 3])
def test_minimum_and_maximum_keep_nan(size):
    run_ranks(_extremes_keep_nan, size, backend="torchtp")


def _premultiplied():
    rank, size = dist.get_rank(), dist.get_world_size()
    for factor in (0.5, torch.tensor([0.5])):
        op = dist._make_nccl_premul_sum(factor)
        tensor = torch.full((30_000,), float(rank + 1))
        dist.all_reduce(tensor, op)
        assert (tensor == 0.5 * size * (size + 1) / 2).all()
        output = torch.empty(7)
        dist.reduce_scatter_tensor(output, torch.full((7 * size,), float(rank + 1)), op)
        assert (output == 0.5 * size * (size + 1) / 2).all()


@pytest.mark.parametrize("size", [1, 3])
def test_premul_sum_scales_before_it_sums(size):
    run_ranks(_premultiplied, size, backend="torchtp")


def _in_the_heap(dtype):
    rank, size = dist.get_rank(), dist.get_world_size()
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert backend.supports_tensor_alloc(torch.device("cpu"))

    def allocate(tensor):
        memory = backend.allocate_tensor(tensor.numel(), dtype=dtype, device=torch.device("cpu"))
        return memory.copy_(tensor)

    for numel in (5, 20_001, 600_001):
        inputs = [_input(r, size * numel, dtype) for r in range(size)]
        expected = _reduced(inputs, Op.SUM)
        tensor = allocate(inputs[rank])
        dist.all_reduce(tensor)
        _check(tensor, expected, ("all_reduce", numel))
        # Only some ranks in the heap, which the others cannot know beforehand.
        tensor = inputs[rank].clone() if rank % 2 else allocate(inputs[rank])
        dist.all_reduce(tensor)
        _check(tensor, expected, ("mixed all_reduce", numel))
        for root in range(size):
            tensor = allocate(inputs[rank])
            dist.reduce(tensor, root)
            _check(tensor, expected if rank == root else inputs[rank], ("reduce", numel, root))
        source = allocate(inputs[rank])
        mine = source[rank * numel : (rank + 1) * numel]  # in place, as FSDP does
        dist.reduce_scatter_tensor(mine, source)
        _check(mine, expected[rank * numel : (rank + 1) * numel], ("reduce_scatter", numel))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_buffers_in_the_segment_give_the_same_sums(size):
    for dtype in (torch.float32, torch.bfloat16):
        run_ranks(_in_the_heap, size, dtype, backend="torchtp")


def _coalesced():
    rank, size = dist.get_rank(), dist.get_world_size()
    numels = (3, 0, 20_001)
    inputs = [[_input(r, numel, torch.float32) for numel in numels] for r in range(size)]
    expected = [_reduced([inputs[r][i] for r in range(size)], Op.SUM) for i in range(len(numels))]
    tensors = [tensor.clone() for tensor in inputs[rank]]
    dist.all_reduce_coalesced(tensors)
    assert all(map(torch.equal, tensors, expected))
    tensors = [tensor.clone() for tensor in inputs[rank]]
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    assert all(map(torch.equal, tensors, expected))
    with dist._coalescing_manager(device=torch.device("cpu")):
        for tensor in tensors:
            dist.reduce(tensor, 0)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_coalesced_all_reduce_sums_each_tensor(size):
    run_ranks(_coalesced, size, backend="torchtp")


def _sparse(dtype):
    rank, size = dist.get_rank(), dist.get_world_size()
    for entries in (0, 3, 4000):  # of rank r: r times as many
        generator = torch.Generator().manual_seed(entries)
        tensors = []
        for r in range(size):
            indices = torch.randint(0, 50, (2, r * entries), generator=generator)
            values = torch.randint(-9, 9, (r * entries, 4), generator=generator).to(dtype)
            tensors.append(torch.sparse_coo_tensor(indices, values, (50, 60, 4)))
        tensor = tensors[rank].clone()
        dist.all_reduce(tensor)
        assert torch.equal(tensor.to_dense(), sum(t.to_dense() for t in tensors)), entries


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_reduce_of_sparse_tensors_is_their_sum(size):
    run_ranks(_sparse, size, torch.float64, backend="torchtp")
