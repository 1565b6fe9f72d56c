"""What torchtp tells of its calls: statistics, and the events that torch.profiler shows."""

import json

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import torchtp
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
    path = f"{folder}/{dist.get_rank()}.json"
    profiler.export_chrome_trace(path)
    with open(path) as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("name") == "record_param_comms"]
    told = [event["args"] for event in sorted(events, key=lambda event: event["ts"])]
    return group.group_name, told


def test_the_profiler_shows_every_collective(tmp_path):
    for rank, (name, told) in enumerate(run_ranks(_profiled, 2, str(tmp_path), backend="torchtp")):
        assert [event["Collective name"] for event in told] == ["allreduce", "allreduce", "_allgather_base"]
        assert [event["dtype"] for event in told] == ["Float", "BFloat16", "Float"]
        assert [event["In msg nelems"] for event in told] == [30, 40, 5]
        assert [event["Out msg nelems"] for event in told] == [30, 40, 10]
        assert {event["Group size"] for event in told} == {2} and {event["Rank"] for event in told} == {rank}
        assert {event["Process Group Name"] for event in told} == {name}
        if "Seq" in told[0]:  # since torch 2.13
            assert [event["Seq"] for event in told] == [0, 1, 2]
            assert [event["Is asynchronized op"] for event in told] == [False, True, False]
