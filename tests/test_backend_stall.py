"""What the backend torchtp says of a rank that does not come, and how long it waits for it."""

import datetime
import os
import re
import signal
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import torchtp
from torchtp import backend
from torchtp.gradients import GradientReducer
from torchtp.testing import run_ranks


def _stopped_in_backward():
    group = dist.new_group(timeout=datetime.timedelta(seconds=4))
    pids = [None, None]
    dist.all_gather_object(pids, os.getpid(), group=group)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    reducer = GradientReducer(model, group)
    model(torch.ones(1, 3)).sum().backward()
    if dist.get_rank() == 1:
        model[1].register_full_backward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGSTOP))
    try:
        model(torch.ones(1, 3)).sum().backward()
    except dist.DistBackendError as error:
        first = str(error)
    if dist.get_rank() == 0:
        os.kill(pids[1], signal.SIGCONT)
    with pytest.raises(dist.DistBackendError) as later:
        dist.barrier(group)
    del reducer
    return first, str(later.value)


def test_a_stopped_rank_is_named_with_the_bucket_it_is_missing_from():
    errors = run_ranks(_stopped_in_backward, 2, backend="torchtp")
    assert len({text for pair in errors for text in pair}) == 1, errors
    for part in (
        "allreduce #",
        "(AVG, fp32, 72 elements, bucket 0: 1.bias ...)",
        "rank 1 has not arrived after 4 s (the timeout of rank 0)",
        "rank 1 stopped (SIGSTOP) ",
        "s ago and last called allreduce #",
    ):
        assert part in errors[0][0], errors[0][0]


def _crossed(members, asynchronous):
    """Rank 1 comes to the other group first; all end in the same error of the one."""
    one = dist.new_group(timeout=datetime.timedelta(seconds=3))
    other = dist.new_group(members)
    rank, tensor = dist.get_rank(), torch.ones(4)
    dist.barrier()
    error = None
    for group in (other, one) if rank == 1 else (one, other):
        try:
            if group is one or rank in members:
                work = dist.all_reduce(tensor, group=group, async_op=asynchronous)
                if asynchronous:
                    work.wait()
        except dist.DistBackendError as raised:
            error = str(raised)
    return error, dist.distributed_c10d._get_process_group_name(other) if rank in members else None


@pytest.mark.parametrize(
    ("members", "asynchronous"), [([0, 1], False), ([0, 1], True), ([1, 2], False)], ids=["two", "works", "three"]
)
def test_ranks_that_call_on_groups_in_another_order_are_named_with_both_groups(members, asynchronous):
    told = run_ranks(_crossed, max(members) + 1, members, asynchronous, backend="torchtp")
    assert len({error for error, _ in told}) == 1, told
    error, name = told[1]
    parts = [
        "allreduce #0 (SUM, fp32, 4 elements): rank 1 has not arrived after 3 s (the timeout of rank ",
        f"; rank 1 has been in allreduce #0 (SUM, fp32, 4 elements) of group '{name}' for ",
        # As the ranks of that group are numbered.
        f" (rank {1 - members.index(1)} has not arrived there) and has called nothing yet",
    ]
    if members == [0, 1]:
        parts += [
            "; rank 1 waits there for rank 0, which waits here: ",
            "deadlock (all ranks must make the same calls in the same order)",
        ]
    for part in parts:
        assert part in error, error


def _circle():
    """Each rank calls on a group with the next one, as where two axes of a mesh are called on in different orders."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    groups = [
        dist.new_group([first, (first + 1) % ranks], timeout=datetime.timedelta(seconds=3)) for first in range(ranks)
    ]
    dist.barrier()
    try:
        dist.all_reduce(torch.ones(4), group=groups[rank])
    except dist.DistBackendError as raised:
        return str(raised)


def test_ranks_that_wait_in_a_circle_of_groups_are_named_with_all_of_them():
    told = run_ranks(_circle, 3, backend="torchtp")
    call = r"allreduce #0 \(SUM, fp32, 4 elements\) of group '\w+'"
    circles = [
        rf"; of group '0' rank {a} waits for rank {b}, rank {b} in {call} for rank {c}, rank {c} in {call} for rank {a}: unless"
        for a, b, c in [(0, 1, 2), (1, 2, 0), (2, 0, 1)]
    ]
    # Of those whose time is over only later the circle is broken already.
    assert any(re.search(circle, error) for circle, error in zip(circles, told, strict=True)), told


@pytest.mark.parametrize(
    ("given", "environment", "expected"),
    [
        (dist.constants.default_pg_timeout, None, 300),
        (dist.constants.default_pg_timeout, "7.5", 7.5),
        (datetime.timedelta(seconds=3), "7.5", 3),
    ],
)
def test_the_timeout_is_the_callers_or_the_environments_or_five_minutes(monkeypatch, given, environment, expected):
    monkeypatch.delenv("TORCHTP_TIMEOUT", raising=False)
    if environment:
        monkeypatch.setenv("TORCHTP_TIMEOUT", environment)
    assert backend.timeout_of(given).total_seconds() == expected


def _timeout_of_a_mesh(seconds):
    dist.init_process_group("torchtp", timeout=datetime.timedelta(seconds=seconds))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "w"))
    groups = [*mesh.get_all_groups(), torchtp.Layout(mesh, {"w": -1}, "dp").gradient_group, dist.new_group()]
    return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]


def test_groups_that_were_given_no_timeout_take_that_of_the_default_group(monkeypatch):
    monkeypatch.delenv("TORCHTP_TIMEOUT", raising=False)
    assert run_ranks(_timeout_of_a_mesh, 4, 77, backend=None, fresh=True) == [[77.0] * 4] * 4


@pytest.mark.parametrize("text", ["", "5 min", "-1", "0", "0.0001", "nan"])
def test_a_timeout_that_is_no_number_of_seconds_is_refused(monkeypatch, text):
    monkeypatch.setenv("TORCHTP_TIMEOUT", text)
    with pytest.raises(ValueError, match="TORCHTP_TIMEOUT must be a positive number of seconds"):
        backend.timeout_of(dist.constants.default_pg_timeout)


@pytest.mark.parametrize("seconds", [0, -5])
def test_a_timeout_that_is_not_positive_is_refused(seconds):
    with pytest.raises(ValueError, match=f"must be positive, not {seconds} s"):
        backend.timeout_of(datetime.timedelta(seconds=seconds))


_MEETS = """
import sys, torch.distributed as dist, torchtp
dist.init_process_group("torchtp", init_method="file://" + sys.argv[2], rank=int(sys.argv[1]), world_size=2)
dist.barrier()
dist.destroy_process_group()
"""


_MAKES = """
import sys, torch, torch.distributed as dist, torchtp
dist.init_process_group("torchtp", init_method="file://" + sys.argv[2], rank=int(sys.argv[1]), world_size=2)
dist.new_group() if sys.argv[1] == "0" else dist.all_reduce(torch.ones(3))
"""


def _start(program, rank, store):
    command = [sys.executable, "-c", program, str(rank), str(store)]
    environment = os.environ | {"TORCHTP_STALL_SECONDS": "0.2"}
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)


def test_a_rank_that_does_not_come_to_the_making_of_a_group_is_named(tmp_path):
    with _start(_MEETS, 0, tmp_path / "store") as first:
        told = next((line for line in first.stderr if line.startswith("[torchtp]")), "")
        with _start(_MEETS, 1, tmp_path / "store") as second:
            assert second.wait() == 0, second.stderr.read()
        assert first.wait() == 0
    assert re.search(
        r"of 2 ranks is being made: rank 1 has not come after 200 ms; rank 0 waits for it, for .* at most", told
    )


def test_a_group_is_not_made_with_a_rank_that_waits_for_who_makes_it(tmp_path):
    with _start(_MAKES, 0, tmp_path / "store") as first, _start(_MAKES, 1, tmp_path / "store") as second:
        told = [first.stderr.read(), second.stderr.read()]
    assert first.returncode == second.returncode == 1
    # Who fails first may be gone before the other one looks.
    deadlocks = re.findall("Error: (torchtp.*that is a deadlock)", "".join(told))
    assert deadlocks
    for deadlock in deadlocks:
        assert re.search(r"new_group '\S+' \(2 ranks\)", deadlock)
        assert "allreduce #0 (SUM, fp32, 3 elements)" in deadlock
