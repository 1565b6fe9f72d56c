"""torchtp.monitored_barrier: rank 0 names who did not come, the others say that they came."""

import datetime
import time

import torch
import torch.distributed as dist

import torchtp
from torchtp.testing import run_ranks


def _without(absent, wait_all_ranks):
    group = dist.new_group()
    torchtp.monitored_barrier(group)
    torchtp.monitored_barrier(group, datetime.timedelta(seconds=30), wait_all_ranks=True)
    error = None
    if dist.get_rank() not in absent:
        try:
            torchtp.monitored_barrier(group, 3.5, wait_all_ranks)
        except RuntimeError as caught:  # gloo has no class of its own
            error = str(caught)
    dist.barrier()  # who does not come has not left
    dist.destroy_process_group(group)
    return error


def test_the_first_missing_rank_is_named_or_all():
    first, _, _, last = run_ranks(_without, 4, [1, 2], False, backend="torchtp")
    assert "Rank 1 failed to pass monitoredBarrier in 3500 ms" in first
    assert "Rank 3 successfully reached monitoredBarrier" in last and "rank 0" in last
    first, *_ = run_ranks(_without, 4, [1, 2], True, backend="torchtp")
    assert "Ranks 1, 2 failed to pass monitoredBarrier in 3500 ms" in first


def test_a_missing_rank_0_is_told_by_those_that_came():
    errors = run_ranks(_without, 3, [0], False, backend="torchtp")
    for rank in (1, 2):
        assert f"Rank {rank} successfully reached monitoredBarrier" in errors[rank]
        assert "rank 0 has not arrived after 3.5 s (the timeout of rank " in errors[rank]


def _mismatch():
    group = dist.new_group([0, 1])
    try:
        if dist.get_rank() == 0:
            torchtp.monitored_barrier(group)
        else:
            dist.all_reduce(torch.ones(3), group=group) if dist.get_rank() == 1 else torchtp.monitored_barrier(group)
    except dist.DistBackendError as caught:
        return str(caught)


def test_another_call_in_its_place_is_told_as_a_mismatch_and_strangers_pass():
    errors = run_ranks(_mismatch, 3, backend="torchtp", fresh=True)
    assert errors[0] == errors[1] and "barrier #0" in errors[0] and "allreduce #0 (SUM, fp32, 3 elements)" in errors[0]
    assert errors[2] is None


def _late_message():
    torchtp.monitored_barrier(timeout=1)
    number, store = torch.zeros(1), dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        store.wait(["rank 1 receives"])
        time.sleep(2)  # that it waits for longer than the barrier may take
        dist.send(torch.ones(1), 1)
    else:
        store.set("rank 1 receives", "")
        dist.recv(number, 0)
    return number.item()


def test_its_timeout_is_not_that_of_messages_behind_it():
    assert run_ranks(_late_message, 2, backend="torchtp") == [0, 1]


def test_gloo_answers_to_the_same_call():
    first, second = run_ranks(_without, 2, [1], False, backend="gloo", fresh=True)
    assert "Rank 1 failed to pass monitoredBarrier in 3500 ms" in first and second is None


def _impatient():
    messages = []
    for timeout in (-1, 0.0, datetime.timedelta(seconds=-2), float("nan"), float("inf")):
        try:
            torchtp.monitored_barrier(timeout=timeout)
        except ValueError as error:
            messages.append(str(error))
    torchtp.monitored_barrier(timeout=30)
    return messages


def test_a_timeout_is_positive():
    for messages in run_ranks(_impatient, 2, backend="torchtp"):
        assert [text.split(":")[1] for text in messages] == [
            f" timeout must be positive and finite, not {s} s" for s in (-1, 0, -2, "nan", "inf")
        ]
