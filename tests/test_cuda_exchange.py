"""The exchange of halos between CUDA devices: what every exchange must do, pulls, graphs, deadlines, streams.

Ranks share the card. Skipped without a GPU; FAIL_WITHOUT_CUDA=1 forbids that.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import test_device_exchange as on_device
from tests import test_exchange as conformance
from torchtp import _C
from torchtp.testing import run_ranks

OPS = torch.ops.torchtp
AVAILABLE = torch.cuda.is_available()

pytestmark = pytest.mark.skipif(not AVAILABLE and not os.environ.get("FAIL_WITHOUT_CUDA"), reason="needs a GPU")

# By backend; the grouped calls of NCCL are in a test of their own.
KINDS = {"peer_memory": "gloo", "staged": "gloo"}


@pytest.fixture(autouse=True)
def _one_card(monkeypatch):
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    monkeypatch.setenv("TORCHTP_EXCHANGE_TIMEOUT", "20")


def _on_ranks(size: int, body: Any, *args: Any, backend: str = "gloo") -> list[Any]:
    # Fresh: the environment of a worker is that of its start.
    return run_ranks(body, size, *args, backend=backend, timeout=120, fresh=True)


def _conforms(kind: str) -> None:
    with on_device.travelling(kind) as (group, _):
        exchange = _C.exchange_of(group, f"cuda:{torch.cuda.current_device()}")
        size = dist.get_world_size()
        conformance._everybody_to_everybody(exchange, dist.barrier, 2000, 20, size)
        conformance._everybody_to_everybody(exchange, dist.barrier, 3 << 20, 4, 7)
        conformance._finish_twice(exchange, dist.barrier)
        if size == 2:
            conformance._two_for_one_peer(exchange, dist.barrier)
            conformance._nobody_looks(exchange, dist.barrier)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_it_does_what_every_exchange_must(kind, size):
    _on_ranks(size, _conforms, kind)


def _differs(kind: str) -> str | None:
    with on_device.travelling(kind) as (group, _):
        return conformance._sizes_differ(
            _C.exchange_of(group, f"cuda:{torch.cuda.current_device()}"), dist.barrier, 100, 128
        )


def test_sizes_that_differ_are_an_error_with_both_sides():
    message = _on_ranks(2, _differs, "peer_memory")[1]
    assert "rank 1 expects 128 bytes from rank 0" in message and "rank 0 sent 100 bytes" in message


@pytest.mark.parametrize("kind", KINDS)
def test_pulls_bring_the_same_bits(kind):
    assert _on_ranks(2, on_device.pulls, kind, "cuda", 2, 60)[0] == [kind]


def test_peer_memory_is_chosen_where_devices_see_each_other():
    assert _on_ranks(2, on_device.pulls, "auto", "cuda", 5, 5)[0] == ["peer_memory"]


@pytest.mark.parametrize("kind", KINDS)
def test_halos_are_the_same(kind):
    _on_ranks(3, on_device.halos, kind, "cuda", 3, 25)


@pytest.mark.parametrize("kind", KINDS)
def test_large_parts_arrive(kind, monkeypatch):
    monkeypatch.setenv("TORCHTP_ARENA_BYTES", str(1 << 20))
    _on_ranks(2, on_device.large_parts, kind, "cuda")


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_the_same(kind):
    _on_ranks(3, on_device.trained, kind, "cuda")


@pytest.mark.parametrize("kind", KINDS)
def test_pulls_of_several_groups_may_overlap(kind):
    _on_ranks(2, on_device.several_groups, kind, "cuda")


def _grouped() -> list[str]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ |= {"NCCL_HOSTID": f"host{rank}", "NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1"}
    os.environ |= {"NCCL_SOCKET_IFNAME": "lo", "NCCL_MAX_CTAS": "1", "NCCL_NVLS_ENABLE": "0"}
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=rank, world_size=size)
    kinds = on_device.pulls("grouped", "cuda", 3, 20)
    on_device.trained("grouped", "cuda")
    return kinds


def test_grouped_calls_of_nccl_move_halos():
    assert run_ranks(_grouped, 2, backend=None, timeout=120, fresh=True)[0] == ["grouped"]


def _captured() -> None:
    part_of = on_device._part
    with on_device.travelling("peer_memory") as (group, plain):
        args = (3, 20, [-2, 8], [12, 22])
        weight = torch.randn(4, 4, 5, 5, dtype=torch.float64)
        static = part_of(torch.zeros(1, 4, 6, 20, dtype=torch.float64), 3).cuda()

        def step(x, w, name):
            wide = OPS.pull(x, *args, name)
            y = OPS.convolution(x, w, None, [1, 1], [2, 2], [1, 1], False, [0, 0], 1, [3], [20], [name])
            return OPS.push_add(wide, *args, name), y

        there = weight.cuda()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step(static, there, group)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            sums, y = step(static, there, group)
        for turn in range(7):
            full = torch.randn(1, 4, 6, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(turn))
            static.copy_(part_of(full, 3))
            graph.replay()
            expected = step(part_of(full, 3), weight, plain)
            torch.testing.assert_close(sums.cpu(), expected[0], rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(y.cpu(), expected[1], rtol=1e-10, atol=1e-10)
            if turn % 3 == 0:  # replays and plain calls in turns
                found = step(static, there, group)
                torch.testing.assert_close(found[1].cpu(), expected[1], rtol=1e-10, atol=1e-10)
        _C.check_exchanges(group)


def test_a_graph_captures_exchanges():
    _on_ranks(2, _captured)


def _stays_away() -> str:
    with on_device.travelling("peer_memory") as (group, _):
        part, args = torch.ones(1, 1, 1, 2, device="cuda"), (3, 4, [0, 1], [3, 4])
        OPS.pull(part, *args, group)
        torch.cuda.synchronize()
        dist.barrier()
        message = ""
        if dist.get_rank() == 0:
            OPS.pull(part, *args, group)
            torch.cuda.synchronize()
        dist.barrier()
        try:
            _C.check_exchanges(group)
            OPS.pull(part, *args, group)
            torch.cuda.synchronize()
            _C.check_exchanges(group)
        except RuntimeError as error:
            message = str(error)
        dist.barrier()
        return message


def test_a_rank_that_stays_away_is_an_error_on_all(monkeypatch):
    monkeypatch.setenv("TORCHTP_EXCHANGE_TIMEOUT", "0.5")
    for message in _on_ranks(2, _stays_away):
        assert "timeout of 500 ms passed on rank 0" in message and "from rank 1" in message


def _on_streams() -> None:
    with on_device.travelling("peer_memory") as (group, plain):
        full = torch.randn(2, 8, 64, 40)
        part, args = on_device._part(full, 3), (3, 40, [-3, 17], [23, 43])
        expected = OPS.pull(part, *args, plain)
        streams = [torch.cuda.Stream() for _ in range(3)]
        there = part.cuda()
        torch.cuda.synchronize()
        found = []
        for turn in range(12):
            with torch.cuda.stream(streams[turn % 3]):
                found.append(OPS.pull(there, *args, group))
        torch.cuda.synchronize()
        assert all(torch.equal(each.cpu(), expected) for each in found)


def test_pulls_on_several_streams_come_in_order():
    _on_ranks(2, _on_streams)
