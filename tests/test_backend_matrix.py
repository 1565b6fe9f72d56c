"""Every collective of the backend torchtp for every dtype, reduce op, way of calling and layout, against closed formulas.

Rank r holds (7 i + 3 r + 1) mod 5 at element i: small whole numbers, so that every sum, product and average is exact in
every dtype, and one formula in 64-bit integers serves them all.
"""

import functools
import itertools
import operator

import pytest
import torch
import torch.distributed as dist

from torchtp.testing import run_ranks

Op = dist.ReduceOp
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex32, torch.complex64, torch.complex128)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
REDUCED = (torch.bool, *INTEGERS, *FLOATS, *COMPLEX)
MOVED = (*REDUCED, *UNSIGNED, *FLOAT8)
NUMELS = (0, 1, 37, 9_001)  # the last is staged in chunks from 4-byte types up
ARITHMETIC = {Op.SUM: operator.add, Op.PRODUCT: operator.mul, Op.MIN: torch.minimum, Op.MAX: torch.maximum}
BITWISE = {Op.BAND: operator.and_, Op.BOR: operator.or_, Op.BXOR: operator.xor}
LOGICAL = {Op.SUM: operator.or_, Op.PRODUCT: operator.and_, Op.MIN: operator.and_, Op.MAX: operator.or_}


def whole(rank, numel):
    return (7 * torch.arange(numel) + 3 * rank + 1) % 5


def as_dtype(tensor, dtype):
    if dtype == torch.bool:
        return tensor % 2 == 1
    return torch.complex(tensor.double(), tensor.double() + 1).to(dtype) if dtype.is_complex else tensor.to(dtype)


def value(rank, numel, dtype):
    return as_dtype(whole(rank, numel), dtype)


def ops_of(dtype):
    if dtype == torch.bool:
        return (*ARITHMETIC, *BITWISE)
    if dtype.is_complex:
        return (Op.SUM, Op.AVG)  # torch.distributed refuses the others
    return (*ARITHMETIC, Op.AVG) if dtype.is_floating_point else (*ARITHMETIC, Op.AVG, *BITWISE)


def reduced(op, numel, dtype, ranks):
    """What `op` makes of the values of `ranks`, each of `numel` elements."""
    if not dtype.is_complex:
        return combined(op, [value(r, numel, dtype) for r in ranks])
    total = functools.reduce(operator.add, [whole(r, numel) for r in ranks])
    real = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}[dtype]
    divisor = len(ranks) if op == Op.AVG else 1
    return torch.complex(total.to(real) / divisor, (total + len(ranks)).to(real) / divisor)


def combined(op, values):
    """What `op` makes of small whole numbers of any dtype but complex ones, by way of 64-bit integers."""
    dtype = values[0].dtype
    if dtype == torch.bool:
        return functools.reduce((LOGICAL | BITWISE)[op], values)
    integers = [each.to(torch.int64) for each in values]
    total = functools.reduce((ARITHMETIC | BITWISE | {Op.AVG: operator.add})[op], integers)
    if op != Op.AVG:
        return total.to(dtype)
    if not dtype.is_floating_point:
        return (total // len(values)).to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return (total.to(wide) / len(values)).to(dtype)


def bits(tensor):
    return torch.zeros(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1)).view(torch.uint8)


def same(actual, expected):
    return (
        actual.dtype == expected.dtype and actual.shape == expected.shape and torch.equal(bits(actual), bits(expected))
    )


def dense(tensor):
    return tensor.clone()


def strided(tensor):
    """The same elements, every third of a longer tensor."""
    holder = torch.zeros(tensor.numel(), 3, dtype=tensor.dtype)
    holder[:, 1] = tensor
    return holder[:, 1]


class Calls:
    """One way of calling: every collective of torch.distributed goes through run()."""

    def __init__(self, way, layout, root):
        self.way, self.layout, self.root = way, layout, root
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def run(self, call, *args, **kwargs):
        work = call(*args, async_op=self.way == "async", **kwargs)
        if work is not None:
            work.wait()

    def empty(self, numel, dtype):
        return self.layout(torch.zeros(numel, dtype=dtype))

    def all_reduce(self, op, numel, dtype):
        tensor = self.layout(value(self.rank, numel, dtype))
        self.run(dist.all_reduce, tensor, op)
        yield tensor, reduced(op, numel, dtype, range(self.size))

    def reduce(self, op, numel, dtype):
        tensor = self.layout(value(self.rank, numel, dtype))
        self.run(dist.reduce, tensor, self.root, op)
        mine = value(self.rank, numel, dtype)
        yield tensor, reduced(op, numel, dtype, range(self.size)) if self.rank == self.root else mine

    def reduce_scatter(self, op, numel, dtype):
        pieces = value(self.rank, self.size * numel, dtype).view(self.size, numel)
        expected = reduced(op, self.size * numel, dtype, range(self.size)).view(self.size, numel)[self.rank]
        output = self.empty(numel, dtype)
        self.run(dist.reduce_scatter, output, [self.layout(piece) for piece in pieces], op)
        yield output, expected
        output = self.empty(numel, dtype)
        self.run(dist.reduce_scatter_tensor, output, self.layout(pieces.reshape(-1)), op)
        yield output, expected

    def broadcast(self, numel, dtype):
        tensor = self.layout(value(self.rank, numel, dtype))
        self.run(dist.broadcast, tensor, self.root)
        yield tensor, value(self.root, numel, dtype)

    def all_gather(self, numel, dtype):
        outputs = [self.empty(numel, dtype) for _ in range(self.size)]
        self.run(dist.all_gather, outputs, self.layout(value(self.rank, numel, dtype)))
        yield from ((output, value(r, numel, dtype)) for r, output in enumerate(outputs))
        output = self.empty(self.size * numel, dtype)
        self.run(dist.all_gather_into_tensor, output, self.layout(value(self.rank, numel, dtype)))
        yield from ((part, value(r, numel, dtype)) for r, part in enumerate(output.view(self.size, numel)))

    def gather(self, numel, dtype):
        is_root = self.rank == self.root
        outputs = [self.empty(numel, dtype) for _ in range(self.size)] if is_root else None
        self.run(dist.gather, self.layout(value(self.rank, numel, dtype)), outputs, self.root)
        yield from ((output, value(r, numel, dtype)) for r, output in enumerate(outputs or []))

    def scatter(self, numel, dtype):
        pieces = [self.layout(value(r, numel, dtype)) for r in range(self.size)]
        output = self.empty(numel, dtype)
        self.run(dist.scatter, output, pieces if self.rank == self.root else None, self.root)
        yield output, value(self.rank, numel, dtype)

    def all_to_all(self, numel, dtype):
        def message(source, target):
            return value(10 * source + target, numel, dtype)

        expected = [message(r, self.rank) for r in range(self.size)]
        outputs = [self.empty(numel, dtype) for _ in range(self.size)]
        self.run(dist.all_to_all, outputs, [self.layout(message(self.rank, r)) for r in range(self.size)])
        yield from zip(outputs, expected, strict=True)
        # Rank s sends s + d rows to rank d.
        rows = [self.rank + r for r in range(self.size)]
        inputs = [message(self.rank, r).repeat(rows[r], 1) for r in range(self.size)]
        output = self.layout(torch.zeros(sum(rows) * numel, dtype=dtype)).view(-1, numel) if numel else None
        if output is not None:
            self.run(dist.all_to_all_single, output, torch.cat(inputs), rows, rows)
            for r, part in enumerate(output.split(rows)):
                yield part, expected[r].repeat(rows[r], 1)

    def neighbours(self, numel, dtype):
        following, previous = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        if self.size > 1:
            received, sent = self.empty(numel, dtype), self.layout(value(self.rank, numel, dtype))
            for work in dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, sent, following), dist.P2POp(dist.irecv, received, previous)]
            ):
                work.wait()
            yield received, value(previous, numel, dtype)


def compare(pairs, what):
    for index, (actual, expected) in enumerate(pairs):
        assert same(actual, expected), (*what, index, actual.reshape(-1)[:8], expected.reshape(-1)[:8])


def _one_by_one():
    ways = itertools.product(("sync", "async"), (dense, strided))
    calls = [Calls(way, layout, index % dist.get_world_size()) for index, (way, layout) in enumerate(ways)]
    for call, numel in itertools.product(calls, NUMELS):
        where = (call.way, call.layout.__name__, numel)
        for dtype in REDUCED:
            for collective, op in itertools.product((call.all_reduce, call.reduce, call.reduce_scatter), ops_of(dtype)):
                compare(collective(op, numel, dtype), (*where, collective.__name__, dtype, op))
        moving = (call.broadcast, call.all_gather, call.gather, call.scatter, call.all_to_all, call.neighbours)
        for collective, dtype in itertools.product(moving, MOVED):
            compare(collective(numel, dtype), (*where, collective.__name__, dtype))


@pytest.mark.parametrize("size", [1, 2, pytest.param(3, marks=pytest.mark.long)])
def test_each_collective_gives_the_closed_formula(size):
    run_ranks(_one_by_one, size, backend="torchtp", timeout=200)


def _made_in_inference_mode(within):
    """Results go into tensors of inference mode, in it and after it: the thread that writes them is in no mode."""
    size = dist.get_world_size()
    for way in ("sync", "async"):
        call = Calls(way, strided, 1)
        with torch.inference_mode():
            tensor, entries = strided(value(call.rank, 37, torch.float32)), torch.eye(3).to_sparse()
            if within:
                for collective in (call.reduce, call.reduce_scatter):
                    compare(collective(Op.SUM, 37, torch.float32), (way, collective.__name__))
                for collective in (call.broadcast, call.all_gather, call.gather, call.scatter, call.neighbours):
                    compare(collective(37, torch.float32), (way, collective.__name__))
        with torch.inference_mode(within):
            call.run(dist.all_reduce, tensor)
            call.run(dist.all_reduce, entries)
        compare([(tensor, reduced(Op.SUM, 37, torch.float32, range(size)))], (way, within))
        assert torch.equal(entries.to_dense(), size * torch.eye(3))


@pytest.mark.parametrize("within", [True, False])
def test_tensors_of_inference_mode_take_results_from_any_thread(within):
    run_ranks(_made_in_inference_mode, 2, within, backend="torchtp")


def _coalesced(call, asynchronous):
    """`call(numel)` for several lengths as one work, or at once where c10d has a call for it."""
    with dist._coalescing_manager(async_ops=asynchronous) as manager:
        pairs = [pair for numel in (37, 0, 9_001) for pair in call(numel)]
    if asynchronous:
        manager.wait()
    compare(pairs, (call, asynchronous))


def _coalescing():
    rank, size = dist.get_rank(), dist.get_world_size()

    def summed(op, numel):
        tensor = value(rank, numel, dtype)
        dist.all_reduce(tensor, op)
        yield tensor, reduced(op, numel, dtype, range(size))

    def scattered(op, numel):
        output = torch.zeros(numel, dtype=dtype)
        dist.reduce_scatter_tensor(output, value(rank, size * numel, dtype), op)
        yield output, reduced(op, size * numel, dtype, range(size)).view(size, numel)[rank]

    def gathered(numel):
        output = torch.zeros(size * numel, dtype=dtype)
        dist.all_gather_into_tensor(output, value(rank, numel, dtype))
        yield output, torch.cat([value(r, numel, dtype) for r in range(size)])

    for dtype in REDUCED:
        for op, asynchronous, call in itertools.product(ops_of(dtype), (False, True), (summed, scattered)):
            _coalesced(functools.partial(call, op), asynchronous)
        for op in ops_of(dtype):
            tensors = [value(rank, numel, dtype) for numel in (37, 0, 9_001)]
            dist.all_reduce_coalesced(tensors, op)
            compare([(t, reduced(op, t.numel(), dtype, range(size))) for t in tensors], (dtype, op, "coalesced"))
    for dtype, asynchronous in itertools.product(MOVED, (False, True)):
        _coalesced(gathered, asynchronous)
        lists = [[torch.zeros(numel, dtype=dtype) for numel in (37, 0, 901)] for _ in range(size)]
        dist.all_gather_coalesced(lists, [value(rank, numel, dtype) for numel in (37, 0, 901)])
        compare([(t, value(r, t.numel(), dtype)) for r, each in enumerate(lists) for t in each], (dtype, "lists"))


@pytest.mark.parametrize("size", [1, 2, pytest.param(3, marks=pytest.mark.long)])
def test_coalesced_collectives_give_the_closed_formula(size):
    run_ranks(_coalescing, size, backend="torchtp", timeout=200)


def _refused():
    for dtype in (*UNSIGNED, *FLOAT8):
        with pytest.raises(RuntimeError, match="torchtp.*dtype"):
            dist.all_reduce(torch.zeros(4, dtype=dtype))
    for dtype, op in [*((d, op) for d in FLOATS for op in BITWISE), (torch.bool, Op.AVG)]:
        with pytest.raises(RuntimeError, match="has no meaning for dtype"):
            dist.all_reduce(torch.zeros(4, dtype=dtype), op)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert (tensor == dist.get_world_size()).all()


def test_what_has_no_meaning_is_refused_and_the_group_goes_on():
    run_ranks(_refused, 2, backend="torchtp")


def _as_gloo():
    """Results of what gloo can do, to be compared with its own."""
    results = []
    calls = Calls("sync", dense, 0)
    for dtype in (torch.uint8, torch.int8, torch.int32, torch.int64, *FLOATS):
        for op in (*ARITHMETIC, *(() if dtype.is_floating_point else BITWISE)):
            for numel in (1, 37, 9_001):
                results += [actual.clone() for actual, _ in calls.all_reduce(op, numel, dtype)]
        for collective in (calls.broadcast, calls.all_gather, calls.gather, calls.scatter):
            results += [actual.clone() for actual, _ in collective(37, dtype)]
    return results


def test_gloo_gives_the_same():
    ours, theirs = (run_ranks(_as_gloo, 2, backend=backend) for backend in ("torchtp", "gloo"))
    for mine, other in zip(ours, theirs, strict=True):
        assert all(map(same, mine, other)) and len(mine) == len(other)
