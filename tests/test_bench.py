"""`torchtp bench`: its figures are of what was asked for, and what can't be measured is told."""

import json
import math

import pytest
import torch

from torchtp import bench, cli

CONVOLUTION = [
    "torch.nn:Conv2d",
    *(f"--argument={text}" for text in ("in_channels=3", "out_channels=4", "kernel_size=3", "padding=1")),
]


def test_calls_are_measured_beside_gloo(monkeypatch, capsys):
    monkeypatch.setattr(bench.calls, "__defaults__", (1, (64, 4096)))
    assert cli.main(["bench", "--ranks", "2", "--repeat", "1", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    ops = ("allreduce", "allgather", "alltoall", "neighbours")
    assert [(row["op"], row["num_bytes"]) for row in rows] == [(op, size) for op in ops for size in (64, 4096)]
    assert all(row["torchtp_s"] > 0 and row["gloo_s"] > 0 for row in rows)


def test_a_training_step_is_measured_beside_one_process_and_gradients_compared(capsys):
    meshes = ["--mesh=w=2", "--mesh=data=2,w=2", "--dtype=fp64"]
    assert cli.main(["bench", *CONVOLUTION, "--shape=1,3,8,12", *meshes, "--repeat=1", "--json"]) == 0
    cut, data = json.loads(capsys.readouterr().out)
    assert cut["mesh"] == {"w": 2}
    assert 0 <= cut["difference"] < 1e-12
    assert data["difference"] is None
    assert cut["one_process_s"] > 0 < cut["mesh_s"]
    table = bench.table_of_steps([bench.StepTime(**cut), bench.StepTime(**data)]).splitlines()
    assert [line.split()[:2] for line in table[1:3]] == [["w=2", "2"], ["data=2,w=2", "4"]]
    assert table[3:] == [
        "Gradients of several data ranks are not compared: norms take the statistics of each one's own images."
    ]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["torch.nn:Conv9d", "--shape=1,3,8,8", "--mesh=w=2"], "torch.nn:Conv9d is not there"),
        ([*CONVOLUTION, "--shape=1,5,8,8", "--mesh=w=2"], "rank 0: RuntimeError: Given groups=1"),
        (["torch.nn:ReLU", "--mesh=w=2"], "a network with --shape and --mesh, or none of them"),
        (["torch.nn:ReLU", "--mesh=w=2", "--shape=1,3,8,8", "--ranks=2"], "--ranks without a network"),
        (["torch.nn:ReLU", "--mesh=x=2", "--shape=1,3,8,8"], "the mesh has an axis 'x'"),
        (["torch.nn:ReLU", "--mesh=w=2", "--shape=1,3,8,8"], "no output takes a gradient"),
        (["--dtype=bf16"], "--argument and --dtype with a network"),
    ],
    ids=["name", "shape", "no shape", "ranks", "axis", "no gradient", "dtype"],
)
def test_what_can_not_be_measured_is_told(arguments, told, capsys):
    assert cli.main(["bench", *arguments]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value", "told"),
    [
        ("--ranks", "0", "from 1 on, not '0'"),
        ("--ranks", "-3", "from 1 on, not '-3'"),
        ("--ranks", "two", "from 1 on, not 'two'"),
        ("--repeat", "0", "from 1 on, not '0'"),
        ("--repeat", "-1", "from 1 on, not '-1'"),
        ("--mesh", "w=0", "at least one rank, but it is 'w=0'"),
        ("--shape", "1,0,8,8", "extents of a shape are positive, but it is '1,0,8,8'"),
    ],
)
def test_numbers_that_are_none_are_usage(flag, value, told, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["bench", f"{flag}={value}"])
    assert caught.value.code == 2
    assert told in capsys.readouterr().err


def test_one_rank_has_no_neighbours():
    assert {call.op for call in bench.calls(1, 1, (64,))} == {"allreduce", "allgather", "alltoall"}


def test_a_gradient_that_is_no_number_is_told():
    one, other = (torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)) for _ in range(2))
    for parameter in (*one.parameters(), *other.parameters()):
        parameter.grad = torch.ones_like(parameter)
    assert bench._difference(one, other) == 0
    other[1].weight.grad.fill_(float("nan"))
    assert math.isnan(bench._difference(one, other))


def test_functions_refuse_less_than_one():
    with pytest.raises(ValueError, match="num_ranks is at least 1, but it is 0"):
        bench.calls(0)
    with pytest.raises(ValueError, match="repeat is at least 1, but it is -1"):
        bench.steps("torch.nn:ReLU", [(1, 3, 8, 8)], {"w": 2}, repeat=-1)
