"""The backend on CUDA tensors, which go to NCCL: the bodies of test_backend_device on a card, and what only a card has.

Ranks share the card. Skipped without a GPU; FAIL_WITHOUT_CUDA=1 forbids that.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import test_backend_device as bodies
from tests import test_gradients as gradients
from torchtp.gradients import GradientReducer
from torchtp.testing import run_ranks

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() and not os.environ.get("FAIL_WITHOUT_CUDA"), reason="needs a GPU"
)


def _with_the_card(body: Any, *args: Any) -> Any:
    os.environ["NCCL_HOSTID"] = f"rank-{dist.get_rank()}"  # NCCL takes two ranks on a card for two of different hosts
    torch.cuda.set_device(0)
    with torch.device("cuda", 0):
        return body(*args)


def _on_ranks(body: Any, *args: Any, size: int = 2) -> list[Any]:
    return run_ranks(_with_the_card, size, body, *args, backend="torchtp", timeout=120, fresh=True)


@pytest.mark.parametrize("calls", [bodies._reductions, bodies._moves])
def test_every_collective_goes_to_nccl(calls):
    _on_ranks(bodies._every_call, calls)


def test_norms_sum_over_the_ranks():
    _on_ranks(bodies._norms)


def test_futures_coalesced_calls_and_messages():
    _on_ranks(bodies._futures_and_coalescing)


def _both_kinds() -> None:
    size = dist.get_world_size()
    with bodies._inner_group() as group:
        for turn in range(6):
            device = "cuda" if turn % 2 else "cpu"
            tensors = [torch.full((n,), float(dist.get_rank()), device=device) for n in (10, 50_000)]
            works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
            for work in works:
                work.wait()
            for tensor in tensors:
                torch.testing.assert_close(tensor, torch.full_like(tensor, size * (size - 1) / 2))


def test_tensors_of_the_card_and_of_the_host_share_a_group():
    _on_ranks(_both_kinds)


def test_calls_that_do_not_match_give_one_error():
    errors = _on_ranks(bodies._mismatch, bodies._shapes)
    assert errors[0] == errors[1]
    assert "3 elements" in errors[0] and "4 elements" in errors[0]


def test_a_rank_that_does_not_come_is_named():
    errors = _on_ranks(bodies._mismatch, bodies._nobody_comes)
    assert "rank 1" in errors[0] and "allreduce" in errors[0]


def _one_on_the_host() -> str:
    with bodies._inner_group(timeout=5) as group:
        device = "cpu" if dist.get_rank() else "cuda"
        return bodies._error_of(lambda: [dist.all_reduce(torch.ones(3, device=device), group=group) for _ in range(2)])


def test_ranks_that_differ_in_the_device_get_one_error():
    errors = _on_ranks(_one_on_the_host)
    assert errors[0] == errors[1]
    assert "3 elements, on a device)" in errors[0] and "3 elements)" in errors[0]


def test_abort_ends_calls():
    assert all("rank 0 called abort()" in error for error in _on_ranks(bodies._aborted))


def test_ddp_and_fsdp_train():
    _on_ranks(bodies._training)


def _subgroups() -> None:
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3]), dist.new_group([1, 2])]
    for turn in range(3):
        for members, group in zip(([0, 1], [2, 3], [1, 2]), pairs, strict=True):
            if rank in members:
                x = torch.full((1000,), float(rank + turn))
                dist.all_reduce(x, group=group)
                torch.testing.assert_close(x, torch.full_like(x, float(sum(members) + 2 * turn)))


def test_subgroups_that_share_ranks():
    _on_ranks(_subgroups, size=4)


def _streams() -> None:
    """A call starts behind what its stream holds; what waits for it starts behind it; other streams do not wait."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with bodies._inner_group() as group:
        side = torch.cuda.Stream()
        for turn in range(4):
            with torch.cuda.stream(side):
                x = torch.zeros(1 << 20)
                for _ in range(30):  # the call must not begin before these
                    x += 1.0
                x += float(rank + turn)
                work = dist.all_reduce(x, group=group, async_op=True)
            work.wait()  # on the current stream, not the side's
            y = x * 2
            torch.testing.assert_close(y, torch.full_like(y, 2.0 * (size * (30 + turn) + size * (size - 1) / 2)))
            x.record_stream(torch.cuda.current_stream())


def test_calls_follow_the_current_stream():
    _on_ranks(_streams)


def _reducer(options: dict[str, Any], bound: float) -> None:
    rank, size, device = dist.get_rank(), dist.get_world_size(), torch.get_default_device()
    dist.all_reduce(torch.zeros(1))  # memory is registered once NCCL is connected
    with torch.device("cpu"):
        plain, model = gradients._net(torch.float32), gradients._net(torch.float32)
    reducer = GradientReducer(model.to(device), bucket_bytes=300, first_bucket_bytes=100, **options)
    errors = []
    for step in range(4):
        with torch.device("cpu"):
            batches = [gradients._batch(step, r, torch.float32) for r in range(size)]
            wanted = gradients._mean_gradients(plain, batches)
        model.zero_grad(set_to_none=bool(step % 2))
        gradients._loss(model(batches[rank].to(device))).backward()
        errors.append(gradients._difference(model, {name: g.to(device) for name, g in wanted.items()}))
    assert all(error < bound for error in errors), errors
    assert len(reducer.buckets) > 1


@pytest.mark.parametrize("options, bound", [({}, 1e-5), ({"compression": "bf16"}, 2e-2)], ids=["plain", "bf16"])
def test_gradients_are_reduced_on_a_stream_of_their_own(options, bound):
    _on_ranks(_reducer, options, bound)


def _registered() -> str:
    with bodies._inner_group() as group:
        dist.all_reduce(torch.ones(4), group=group)
        memory = bodies._backend(group).allocate_tensor(1 << 20, dtype=torch.float32, device=torch.device("cuda", 0))
        memory.fill_(dist.get_rank() + 1.0)
        dist.all_reduce(memory, group=group)
        torch.testing.assert_close(memory, torch.full_like(memory, 3.0))
        return str(memory.device)


def test_memory_that_nccl_may_register():
    assert _on_ranks(_registered) == ["cuda:0"] * 2
