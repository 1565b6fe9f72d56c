"""What torchtp tells of its calls: statistics, and the events that torch.profiler shows."""

import json

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import torchtp
from torchtp import _C
from torchtp.observe import statistics
from torchtp.testing import run_ranks


def _of_group(name):
    return next(one for one in torchtp.stats().groups if one.group == name)


def _counts():
    group = dist.new_group(backend="torchtp")
    name = group.group_name
    tensor, large = torch.ones(256), torch.ones(100_000)
    for _ in range(3):
        dist.all_reduce(tensor, group=group)
    dist.all_reduce(large, async_op=True, group=group).wait()
    dist.all_gather_into_tensor(torch.empty(256 * dist.get_world_size()), tensor, group=group)
    dist.barrier(group)
    told = _of_group(name)
    rows = {(row.op, row.most_bytes): row for row in told.calls}
    gathered = 1024 * dist.get_world_size()
    most = 1 << (gathered - 1).bit_length()
    assert set(rows) == {("allreduce", 1024), ("allreduce", 1 << 19), ("allgather", most), ("barrier", 1)}
    small = rows["allreduce", 1024]
    assert (small.count, small.failed, small.num_bytes) == (3, 0, 3 * 1024)
    assert 0 < small.shortest_s <= small.longest_s <= small.total_s
    assert small.shortest_s * 0.75 <= small.median_s <= small.longest_s * 1.25
    assert rows["allreduce", 1 << 19].num_bytes == 400_000
    assert "allreduce" in str(told) and "512.0 KiB" in str(told)
    torchtp.stats(reset=True)
    assert _of_group(name).calls == ()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_calls_are_counted_by_op_and_size(size):
    run_ranks(_counts, size, backend="torchtp")


def test_no_quantile_lies_outside_of_what_there_was():
    """Quantiles are of classes of durations, of which the middle may."""
    names = ("total_ns", "queued_ns", "waited_ns", "shortest_ns", "median_ns", "late_ns", "longest_ns")
    row = {"op": "allreduce", "most_bytes": 64, "count": 2, "failed": 0, "num_bytes": 128}
    row |= dict(zip(names, (8_500_000, 0, 0, 4_100_000, 4_700_000, 4_000_000, 4_400_000), strict=True))
    told = statistics._group({"group": "g", "rank": 0, "size": 1, "global_ranks": [0], "rows": [row], "waited_ns": []})
    (call,) = told.calls
    assert (call.median_s, call.late_s) == (call.longest_s, call.shortest_s)


def _waits():
    group = dist.new_group(backend="torchtp")
    dist.all_reduce(torch.ones(10), group=group)
    return _of_group(group.group_name).waited_s


def test_every_rank_knows_who_was_waited_for():
    seen = run_ranks(_waits, 3, backend="torchtp")
    assert seen[0] == seen[1] == seen[2]
    late = next(rank for rank in range(3) if any(of_rank[rank] for of_rank in seen[0]))
    for rank in range(3):
        for other in range(3):
            assert (seen[0][rank][other] > 0) == (other == late and rank != late)


def _messages():
    group = dist.new_group(backend="torchtp")
    rank, size = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % size, (rank - 1) % size
    tensor, other = torch.ones(100), torch.empty(100)
    for turn in range(3):
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, tensor, after, group, turn),
                dist.P2POp(dist.irecv, other, before, group, turn),
            ]
        )
        for work in works:
            work.wait()
    large = torch.ones(1_500_000)  # more than there is room for at once
    work = dist.isend(large, after, group)
    dist.recv(torch.empty_like(large), group=group)  # from any
    work.wait()
    dist.barrier(group)
    told = _of_group(group.group_name)
    rows = {(row.op, row.most_bytes): row for row in told.calls if row.op != "barrier"}
    assert set(rows) == {("send", 512), ("recv", 512), ("send", 1 << 23), ("recvAnySource", 1 << 23)}
    for (_, most), row in rows.items():
        assert (row.count, row.failed) == ((3, 0) if most == 512 else (1, 0))
        assert row.num_bytes == (1200 if most == 512 else 6_000_000)
        assert 0 <= row.waited_s <= row.total_s and row.longest_s > 0 and row.queued_s == 0
    assert "recvAnySource" in str(told)


@pytest.mark.parametrize("size", [2, 3])
def test_messages_are_counted_by_op_and_size(size):
    run_ranks(_messages, size, backend="torchtp")


def _answers():
    """Rank 0 asks, and waits for the answer."""
    group = dist.new_group(backend="torchtp")
    rank, tensor = dist.get_rank(), torch.ones(1)
    if rank == 2:
        return _of_group(group.group_name)
    for _ in range(300):
        for sender in (0, 1):
            dist.send(tensor, 1 - rank, group) if rank == sender else dist.recv(tensor, 1 - rank, group)
    return _of_group(group.group_name)


def test_waiting_for_a_message_is_waiting_for_its_sender():
    told = run_ranks(_answers, 3, backend="torchtp")
    for rank in (0, 1):
        rows = {row.op: row for row in told[rank].calls}
        waited = told[rank].waited_s[rank]
        assert waited[1 - rank] > 0 and waited[2] == 0
        assert waited[1 - rank] == pytest.approx(rows["recv"].waited_s + rows["send"].waited_s)
        assert rows["send"].waited_s == 0  # there is always room
    assert not any(map(any, told[2].waited_s))


def _halos():
    group = dist.new_group(backend="torchtp")
    exchange = _C.exchange_of(group.group_name, "cpu")
    peer = 1 - dist.get_rank()
    for step in range(300):
        if step % 100 == peer:  # each lets the other wait, also where the other is the slower one
            torch.randn(1 << 20).sort()
        exchange.finish(exchange.start([(peer, 0, b"x" * 700)], [(peer, 700)]))
    ticket = exchange.start([], [])
    exchange.finish(ticket)
    return _of_group(group.group_name)


def test_halos_are_counted_and_waiting_for_them_is_waiting_for_their_sender():
    for rank, told in enumerate(run_ranks(_halos, 2, backend="torchtp")):
        rows = {(row.op, row.most_bytes): row for row in told.calls}
        assert set(rows) == {("halo", 1024), ("halo", 1)}
        row = rows["halo", 1024]
        assert (row.count, row.failed, row.num_bytes) == (300, 0, 300 * 700)
        assert 0 < row.waited_s < row.total_s
        assert told.waited_s[rank][1 - rank] == pytest.approx(row.waited_s)


def _failed_messages():
    group = dist.new_group(backend="torchtp")
    tensor = torch.ones(10 + dist.get_rank())
    with pytest.raises(dist.DistBackendError):
        dist.send(tensor, 1, group) if dist.get_rank() == 0 else dist.recv(tensor, 0, group)
        dist.barrier(group)
    rows = {row.op: (row.count, row.failed) for row in _of_group(group.group_name).calls}
    assert rows.get("recv", (0, 1)) == (0, 1)
    return rows


def test_messages_that_failed_are_counted_apart():
    assert run_ranks(_failed_messages, 2, backend="torchtp")[1]["recv"] == (0, 1)


def _failures():
    group = dist.new_group(backend="torchtp")
    with pytest.raises(dist.DistBackendError):
        dist.all_reduce(torch.ones(10 + dist.get_rank()), group=group)
    row = _of_group(group.group_name).calls[0]
    assert (row.op, row.count, row.failed) == ("allreduce", 0, 1)


def test_failed_calls_are_counted_apart():
    run_ranks(_failures, 2, backend="torchtp")


def _profiled(folder):
    group = dist.new_group(backend="torchtp")
    size = dist.get_world_size()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        dist.all_reduce(torch.ones(30), group=group)
        dist.all_reduce(torch.ones(40, dtype=torch.bfloat16), async_op=True, group=group).wait()
        dist.all_gather_into_tensor(torch.empty(5 * size), torch.ones(5), group=group)
        if dist.get_rank() == 0:
            dist.send(torch.ones(3), 1, group)
        else:
            dist.recv(torch.empty(3), 0, group)
        exchange = _C.exchange_of(group.group_name, "cpu")
        peer = 1 - dist.get_rank()
        exchange.finish(exchange.start([(peer, 0, b"x" * (6 + peer))], [(peer, 7 - peer)]))
    path = f"{folder}/{dist.get_rank()}.json"
    profiler.export_chrome_trace(path)
    with open(path) as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("name") == "record_param_comms"]
    told = [event["args"] for event in sorted(events, key=lambda event: event["ts"])]
    return group.group_name, told


def test_the_profiler_shows_every_call(tmp_path):
    for rank, (name, told) in enumerate(run_ranks(_profiled, 2, str(tmp_path), backend="torchtp")):
        message = ("recv" if rank else "send", "Float", 3 * (1 - rank), 3 * rank)
        expected = [
            ("allreduce", "Float", 30, 30),
            ("allreduce", "BFloat16", 40, 40),
            ("_allgather_base", "Float", 5, 10),
            message,
            ("halo", "Byte", 7 - rank, 6 + rank),
        ]
        keys = ("Collective name", "dtype", "In msg nelems", "Out msg nelems")
        assert [tuple(event[key] for key in keys) for event in told] == expected
        assert {event["Group size"] for event in told} == {2} and {event["Rank"] for event in told} == {rank}
        assert {event["Process Group Name"] for event in told} == {name}
        if "Seq" in told[0]:  # since torch 2.13
            assert [event["Seq"] for event in told] == [0, 1, 2, 0, 1]
            assert [event["Is asynchronized op"] for event in told] == [False, True, False, True, False]
