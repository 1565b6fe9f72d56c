"""Random programs of collectives and messages on overlapping groups, each with the results that formulas give."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from forked import strike_myself
from test_backend_matrix import Op, as_dtype, bits, combined, ops_of
from torch import Tensor

DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)
# Around what changes the way of a collective: nothing, one round, chunks, and memory of the ranks' own.
NUMELS = (0, 1, 3, 64, 1_000, 4_099, 30_000, 120_001, 600_000)
LAYOUTS = ("dense", "strided", "transposed", "odd address", "segment")

Checks = list[tuple[Tensor, Tensor]]
"""A result, and what it should be."""


def value(number: int, rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """What `rank` brings to call `number`: 0 to 3, so that products of five are exact in all dtypes."""
    return as_dtype((5 * torch.arange(numel) + 3 * rank + 7 * number + numel) % 4, dtype)


class Call:
    """One call on one group, seen by one of its ranks."""

    def __init__(self, number: int, group: Any, ranks: list[int], draw: random.Random):
        self.number, self.group, self.ranks = number, group, ranks
        self.draw, self.mine = draw, random.Random(draw.random() + dist.get_rank())
        self.rank, self.size = ranks.index(dist.get_rank()), len(ranks)
        self.dtype, self.numel = draw.choice(DTYPES), draw.choice(NUMELS)
        self.op = draw.choice(ops_of(self.dtype))
        self.root = draw.randrange(self.size)
        self.kind = draw.choice(KINDS)

    def __str__(self) -> str:
        return f"#{self.number} {self.kind.__name__}, {self.op}, {self.dtype}, {self.numel} elements, root {self.root}, ranks {self.ranks}"

    def value(self, rank: int, numel: int | None = None) -> Tensor:
        return value(self.number, rank, self.numel if numel is None else numel, self.dtype)

    def laid(self, tensor: Tensor) -> Tensor:
        """The same elements in memory of a layout of this rank's own choice."""
        layout = self.mine.choice(LAYOUTS)
        numel, dtype = tensor.numel(), tensor.dtype
        if layout == "strided":
            return torch.zeros(numel, 3, dtype=dtype)[:, 1].copy_(tensor)
        if layout == "transposed" and numel % 4 == 0 and numel:
            return torch.zeros(4, numel // 4, dtype=dtype).t().copy_(tensor.view(numel // 4, 4))
        if layout == "odd address":
            return torch.zeros(numel + 1, dtype=dtype)[1:].copy_(tensor)
        if layout == "segment" and numel:
            backend = self.group._get_backend(torch.device("cpu"))
            return backend.allocate_tensor(numel, dtype=dtype, device=torch.device("cpu")).copy_(tensor)
        return tensor.clone()

    def holes(self, numel: int) -> Tensor:
        return self.laid(torch.ones(numel, dtype=self.dtype))


def _all_reduce(call: Call) -> tuple[list[Any], Checks]:
    tensor = call.laid(call.value(call.rank))
    expected = combined(call.op, [call.value(rank) for rank in range(call.size)])
    return [dist.all_reduce(tensor, call.op, group=call.group, async_op=True)], [(tensor, expected)]


def _reduce(call: Call) -> tuple[list[Any], Checks]:
    tensor = call.laid(call.value(call.rank))
    expected = combined(call.op, [call.value(rank) for rank in range(call.size)])
    work = dist.reduce(tensor, op=call.op, group=call.group, group_dst=call.root, async_op=True)
    return [work], [(tensor, expected if call.rank == call.root else call.value(call.rank))]


def _broadcast(call: Call) -> tuple[list[Any], Checks]:
    tensor = call.laid(call.value(call.rank))
    work = dist.broadcast(tensor, group=call.group, group_src=call.root, async_op=True)
    return [work], [(tensor, call.value(call.root))]


def _all_gather(call: Call) -> tuple[list[Any], Checks]:
    outputs = [call.holes(call.numel) for _ in call.ranks]
    work = dist.all_gather(outputs, call.laid(call.value(call.rank)), group=call.group, async_op=True)
    return [work], [(output, call.value(rank)) for rank, output in enumerate(outputs)]


def _all_gather_into(call: Call) -> tuple[list[Any], Checks]:
    output = torch.ones(call.size * call.numel, dtype=call.dtype)
    work = dist.all_gather_into_tensor(output, call.value(call.rank), group=call.group, async_op=True)
    return [work], [(output, torch.cat([call.value(rank) for rank in range(call.size)]))]


def _gather(call: Call) -> tuple[list[Any], Checks]:
    outputs = [call.holes(call.numel) for _ in call.ranks] if call.rank == call.root else None
    tensor = call.laid(call.value(call.rank))
    work = dist.gather(tensor, outputs, group=call.group, group_dst=call.root, async_op=True)
    return [work], [(output, call.value(rank)) for rank, output in enumerate(outputs or [])]


def _scatter(call: Call) -> tuple[list[Any], Checks]:
    inputs = [call.laid(call.value(rank)) for rank in range(call.size)] if call.rank == call.root else None
    output = call.holes(call.numel)
    work = dist.scatter(output, inputs, group=call.group, group_src=call.root, async_op=True)
    return [work], [(output, call.value(call.rank))]


def _reduce_scatter(call: Call) -> tuple[list[Any], Checks]:
    inputs = [call.laid(call.value(call.rank + place)) for place in range(call.size)]
    output = call.holes(call.numel)
    expected = combined(call.op, [call.value(rank + call.rank) for rank in range(call.size)])
    return [dist.reduce_scatter(output, inputs, call.op, group=call.group, async_op=True)], [(output, expected)]


def _reduce_scatter_tensor(call: Call) -> tuple[list[Any], Checks]:
    tensor = torch.cat([call.value(call.rank + place) for place in range(call.size)])
    output = torch.ones(call.numel, dtype=call.dtype)
    expected = combined(call.op, [call.value(rank + call.rank) for rank in range(call.size)])
    return [dist.reduce_scatter_tensor(output, tensor, call.op, group=call.group, async_op=True)], [(output, expected)]


def _all_to_all(call: Call) -> tuple[list[Any], Checks]:
    inputs = [call.laid(call.value(call.rank * call.size + to)) for to in range(call.size)]
    outputs = [call.holes(call.numel) for _ in call.ranks]
    work = dist.all_to_all(outputs, inputs, group=call.group, async_op=True)
    return [work], [(output, call.value(of * call.size + call.rank)) for of, output in enumerate(outputs)]


def _all_to_all_single(call: Call) -> tuple[list[Any], Checks]:
    counts = [[call.draw.choice((0, 1, call.numel // 3, call.numel)) for _ in call.ranks] for _ in call.ranks]
    sent, received = counts[call.rank], [row[call.rank] for row in counts]
    tensor = torch.cat([call.value(call.rank * call.size + to, numel) for to, numel in enumerate(sent)])
    output = torch.ones(sum(received), dtype=call.dtype)
    work = dist.all_to_all_single(output, tensor, received, sent, group=call.group, async_op=True)
    pieces = [call.value(of * call.size + call.rank, numel) for of, numel in enumerate(received)]
    return [work], [(output, torch.cat(pieces))]


def _coalesced(call: Call) -> tuple[list[Any], Checks]:
    checks = []
    with dist._coalescing_manager(group=call.group, async_ops=True) as manager:
        for place in range(call.draw.randint(1, 4)):
            tensor = call.value(call.rank + place, call.numel // (place + 1))
            parts = [call.value(rank + place, call.numel // (place + 1)) for rank in range(call.size)]
            checks.append((tensor, combined(call.op, parts)))
            dist.all_reduce(tensor, call.op, group=call.group)
    return [manager], checks


def _barrier(call: Call) -> tuple[list[Any], Checks]:
    return [dist.barrier(group=call.group, async_op=True)], []


def _messages(call: Call) -> tuple[list[Any], Checks]:
    """Up to six messages between any two ranks, with tags; each rank begins its own in any order that tags allow."""
    works, checks, mine = [], [], []
    for place in range(call.draw.randint(1, 6)):
        sender, receiver = call.draw.randrange(call.size), call.draw.randrange(call.size)
        numel, tag = call.draw.choice(NUMELS), 1000 * call.number + place
        if call.rank in (sender, receiver) and sender != receiver:
            mine.append((sender, receiver, numel, tag))
    call.mine.shuffle(mine)
    for sender, receiver, numel, tag in mine:
        content = value(tag, sender, numel, call.dtype)
        if call.rank == sender:
            works.append(dist.isend(call.laid(content), group=call.group, group_dst=receiver, tag=tag))
        else:
            output = call.holes(numel)
            works.append(dist.irecv(output, group=call.group, group_src=sender, tag=tag))
            checks.append((output, content))
    return works, checks


def _exchange(call: Call) -> tuple[list[Any], Checks]:
    """Every rank with the next and the one before, in one batch."""
    following, previous = (call.rank + 1) % call.size, (call.rank - 1) % call.size
    if call.size == 1:
        return [], []
    output = call.holes(call.numel)
    batch = [
        dist.P2POp(dist.isend, call.laid(call.value(call.rank)), group=call.group, group_peer=following),
        dist.P2POp(dist.irecv, output, group=call.group, group_peer=previous),
    ]
    call.mine.shuffle(batch)
    return dist.batch_isend_irecv(batch), [(output, call.value(previous))]


def _objects(call: Call) -> tuple[list[Any], Checks]:
    """Objects of other sizes on each rank."""
    content: list[Any] = [None] * call.size
    dist.all_gather_object(content, call.value(call.rank, call.numel // (call.rank + 1)), group=call.group)
    checks = [(got, call.value(rank, call.numel // (rank + 1))) for rank, got in enumerate(content)]
    sent = [{"number": call.number}, call.value(call.root)] if call.rank == call.root else [None, None]
    dist.broadcast_object_list(sent, group=call.group, group_src=call.root)
    assert sent[0] == {"number": call.number}
    return [], [*checks, (sent[1], call.value(call.root))]


KINDS: tuple[Callable[[Call], tuple[list[Any], Checks]], ...] = (
    _all_reduce,
    _all_reduce,
    _reduce,
    _broadcast,
    _all_gather,
    _all_gather_into,
    _gather,
    _scatter,
    _reduce_scatter,
    _reduce_scatter_tensor,
    _all_to_all,
    _all_to_all_single,
    _coalesced,
    _barrier,
    _messages,
    _exchange,
    _objects,
)


Groups = list[tuple[Any, list[int]]]
"""Groups and their ranks; None where this rank is no member."""


def _groups(draw: random.Random, timeout: timedelta | None = None) -> Groups:
    """Of all ranks of the world, and up to four of any of them."""
    everyone = range(dist.get_world_size())
    chosen = [list(everyone)]
    chosen += [sorted(draw.sample(everyone, draw.randint(1, len(everyone)))) for _ in range(draw.randint(1, 4))]
    groups = [dist.new_group(ranks, timeout=timeout) for ranks in chosen]
    return [(group if dist.get_rank() in ranks else None, ranks) for group, ranks in zip(groups, chosen, strict=True)]


def _end(groups: Groups) -> None:
    for group, _ in groups:
        if group is not None:
            dist.destroy_process_group(group)


class UnderWay:
    """Calls that have begun."""

    def __init__(self, seed: int, mine: random.Random):
        self.seed, self.mine = seed, mine
        self.calls: list[tuple[Call, list[Any], Checks]] = []

    def begin(self, call: Call, synchronous: bool) -> None:
        works, checks = call.kind(call)
        self.calls.append((call, works, checks))
        if synchronous:
            for work in works:
                work.wait()

    def finish(self, keep: int = 0) -> None:
        """Wait for all but `keep` of them, in an order of this rank's own."""
        self.mine.shuffle(self.calls)
        for call, works, checks in self.calls[keep:]:
            for work in works:
                work.wait()
            for got, expected in checks:
                flat = got.reshape(-1)
                if flat.shape != expected.shape or not torch.equal(bits(flat), bits(expected)):
                    raise AssertionError(f"seed {self.seed}: {call} gave {flat} instead of {expected}")
        del self.calls[keep:]


def _mixed(calls: list[Call], mine: random.Random) -> list[Call]:
    """Of each group in order, of several groups as this rank likes."""
    queues: dict[int, list[Call]] = {}
    for call in calls:
        queues.setdefault(id(call.group), []).append(call)
    turns = [key for key, queue in queues.items() for _ in queue]
    mine.shuffle(turns)
    return [queues[key].pop(0) for key in turns]


def run_right(seeds: range, num_blocks: int = 12) -> int:
    """Run the programs of `seeds`, and compare; the number of calls this rank took part in."""
    taken = 0
    for seed in seeds:
        draw, mine = random.Random(seed), random.Random(seed * 1000 + dist.get_rank())
        groups = _groups(draw)
        under_way = UnderWay(seed, mine)
        number = 0
        for _ in range(num_blocks):
            calls = []
            for _ in range(draw.randint(1, 5)):
                (group, ranks), call_draw, number = draw.choice(groups), random.Random(draw.random()), number + 1
                if group is not None:
                    calls.append(Call(number, group, ranks, call_draw))
            if draw.random() < 0.5:
                for call in _mixed([call for call in calls if call.kind is not _objects], mine):
                    under_way.begin(call, synchronous=False)
            else:
                for call in calls:
                    under_way.begin(call, synchronous=call.draw.random() < 0.4)
            taken += len(calls)
            under_way.finish(mine.randint(0, len(under_way.calls)) if draw.random() < 0.5 else 0)
        under_way.finish()
        _end(groups)
    return taken


def run_until_a_death(rank: int, size: int, port: int, seed: int) -> None:
    """Run programs, one after the other, until a rank that `seed` chooses is killed within its first second."""
    draw = random.Random(seed)
    victim, after_us = draw.randrange(size), draw.randrange(600_000)
    store = dist.PrefixStore(str(seed), dist.TCPStore("127.0.0.1", port, wait_for_workers=False))
    dist.init_process_group("torchtp", store=store, rank=rank, world_size=size)
    dist.barrier()
    if rank == victim:
        strike_myself(signal.SIGKILL, after_us)
    for program in count(1000 * seed):
        run_right(range(program, program + 1))


FAULTS = ("dtype", "numel", "op", "root", "message", "kind", "skipped")
MATTER_TO = {
    "dtype": (_all_reduce, _broadcast, _all_gather, _scatter, _reduce_scatter),
    "numel": (_all_reduce, _broadcast, _all_gather, _scatter, _reduce_scatter),
    "op": (_all_reduce, _reduce, _reduce_scatter),
    "root": (_reduce, _broadcast, _gather, _scatter),
    "message": (_exchange,),
    "kind": KINDS,
    "skipped": KINDS,
}


def _spoil(call: Call, fault: str) -> None:
    """Make it another call than that of the other ranks."""
    others = {"dtype": DTYPES, "numel": NUMELS, "root": range(call.size), "op": ops_of(call.dtype), "kind": KINDS}
    what = "numel" if fault == "message" else fault
    setattr(call, what, call.mine.choice([other for other in others[what] if other != getattr(call, what)]))
    if fault == "dtype":
        call.op = Op.SUM


def _run_wrong(seed: int, fault: str, draw: random.Random, groups: Groups) -> None:
    under_way = UnderWay(seed, random.Random(seed * 1000 + dist.get_rank()))
    at = draw.randrange(2, 10)
    for number in range(15):
        group, ranks = groups[0] if number == at else draw.choice(groups)
        call_draw, who = random.Random(draw.random()), draw.choice(ranks)
        if group is None:
            continue
        call = Call(number, group, ranks, call_draw)
        if number == at:
            call.kind = call_draw.choice(MATTER_TO[fault])
            if dist.get_rank() == who:
                if fault == "skipped":
                    continue
                _spoil(call, fault)
        under_way.begin(call, synchronous=call_draw.random() < 0.5)
        if call_draw.random() < 0.5:
            under_way.finish()
    under_way.finish()


def run_wrong(seeds: range, seconds: float) -> list[tuple[int, str, str]]:
    """Run the programs of `seeds`, in each of which one rank does another thing once; seed, fault, and this rank's error.

    A rank waits no longer than `seconds` for one that does not come.
    """
    ends = []
    for seed in seeds:
        draw = random.Random(seed)
        groups, fault = _groups(draw, timedelta(seconds=seconds)), draw.choice(FAULTS)
        told = ""
        try:
            _run_wrong(seed, fault, draw, groups)
        except RuntimeError as error:  # an AssertionError, of a wrong result, is none
            told = str(error)
        ends.append((seed, fault, told))
        dist.barrier()
    return ends
