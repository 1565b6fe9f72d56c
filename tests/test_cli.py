import json
import subprocess
import sys

import pytest
import torch

import torchtp
from torchtp import _extension, cli, named


def test_info_tells_build_machine_backends_and_ops(capsys):
    assert cli.main(["info"]) == 0
    text = capsys.readouterr().out
    assert f"torch            {torch.__version__}\n" in text
    assert "convolution" in text and "gloo" in text


def test_info_as_json(capsys):
    assert cli.main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["torchtp"] == torchtp.__version__
    assert facts["built for torch"] == torch.__version__.split("+")[0]
    assert {"pull", "push_add", "convolution"} <= set(facts["ops"])
    assert "undefined" not in facts["backends"]


@pytest.mark.parametrize(("words", "compiler"), [("", "c++"), ("g++ -m64", "g++"), ("ccache g++", "g++")])
def test_a_compiler_is_found_in_what_cxx_says(words, compiler):
    assert cli._compiler(words) == compiler


def test_a_module_takes_no_arguments(monkeypatch):
    monkeypatch.setattr(torch.nn, "made", torch.nn.ReLU(), raising=False)
    assert named.made("torch.nn:made", {}) is torch.nn.made
    with pytest.raises(ValueError, match="is a torch.nn.Module already"):
        named.made("torch.nn:made", {"inplace": True})


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == torchtp.__version__ + "\n"


def test_python_dash_m_is_the_same_command():
    done = subprocess.run([sys.executable, "-m", "torchtp", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == torchtp.__version__ + "\n"


def test_without_a_command_help_is_shown(capsys):
    assert cli.main([]) == 2
    assert "info" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["info", "--help"],
        ["plan", "--help"],
        ["trace", "--help"],
        ["timeline", "--help"],
        ["bench", "--help"],
    ],
)
def test_help_is_complete(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 0
    assert "--help" in capsys.readouterr().out


def test_a_torchtp_that_cannot_be_loaded_is_one_sentence(monkeypatch, capsys):
    def refuse():
        raise ImportError("torchtp is not built for this Python")

    monkeypatch.setattr(_extension, "find", refuse)
    assert cli.main(["info"]) == 1
    assert capsys.readouterr().err == "torchtp: torchtp is not built for this Python\n"


PLAN = ["plan", "models:convnext", "--shape", "1,2,640,960"]


def test_plan_compares_meshes(capsys):
    assert cli.main([*PLAN, "--mesh", "w=2", "--mesh", "h=2,w=2", "--mesh", "w=250", "--details"]) == 0
    table, *details = capsys.readouterr().out.split("\n\nA training step")
    rows = [line.split() for line in table.splitlines()]
    assert [row[0] for row in rows[2:6]] == ["one", "w=2", "h=2,w=2", "w=250"]
    assert "50.0%" in rows[3] and "25.0%" in rows[4]
    assert "thinner than a halo: w=250" in table and "hold nothing of some activations: w=250" in table
    assert len(details) == 3 and "mesh h=2,w=2: 4 ranks" in details[1]


def test_plan_as_json(capsys):
    assert cli.main([*PLAN, "--mesh", "data=2,w=2", "--dtype", "bf16", "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert told["mesh"] == {"data": 2, "w": 2} and told["dtype"] == "torch.bfloat16" and told["gathers"] == []


@pytest.mark.parametrize(
    ("network", "shape", "mesh", "message"),
    [
        ("models", "1,2,8,8", "w=2", "package.module:callable"),
        ("models:nothing", "1,2,8,8", "w=2", "models:nothing is not there"),
        ("nowhere:nothing", "1,2,8,8", "w=2", "nowhere:nothing is not there"),
        ("models:NETWORKS", "1,2,8,8", "w=2", "makes a dict"),
        ("models:make_network", "1,2,8,8", "w=2", "makes no network: TypeError"),
        ("models:convnext", "1,5,8,8", "w=2", "images of shape"),
        ("models:convnext", "1,2,8,8", "x=2", "axis 'x'"),
        ("test_cli:Raising", "1,2,8,8", "w=2", "without data fails: KeyError: 'what is not there'"),
        ("torch.nn:Flatten", "1,2,8,4611686018427387904", "w=2", "without data fails: "),
        ("torch.nn:Flatten", f"1,2,8,{10**22}", "w=2", 'Overflow when unpacking long long"'),
    ],
)
def test_a_plan_that_is_not_possible_is_one_message(network, shape, mesh, message, capsys):
    assert cli.main(["plan", network, "--shape", shape, "--mesh", mesh]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert "frame #" not in told and "Exception raised from" not in told


class Raising(torch.nn.Module):
    def forward(self, x):
        raise KeyError("what is not there")


def test_of_nothing_kept_there_is_no_share(capsys):
    assert cli.main(["plan", "torch.nn:Identity", "--shape", "1,2,8,8", "--mesh", "w=2", "--details"]) == 0
    assert "%" not in capsys.readouterr().out


def test_a_network_that_takes_arguments_is_planned(capsys):
    command = ["plan", "models:make_network", "--shape", "1,2,9,13", "--mesh", "w=2", "--json"]
    assert cli.main([*command, "--argument", "name=unet"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["dtype"] == "torch.float64"
    assert cli.main(["plan", "models:convnext", *command[2:], "--argument", "drop=0.5"]) == 0


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--argument", "3=4"),
        ("--shape", "1,x"),
        ("--shape", "1,2,-8,8"),
        ("--mesh", "h2"),
        ("--mesh", "h=two"),
        ("--mesh", "h=2,h=3"),
        ("--mesh", "h=0"),
    ],
)
def test_a_plan_that_is_not_understood_is_usage(flag, value, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main([*PLAN, "--mesh", "w=2", flag, value])
    assert caught.value.code == 2
    assert value in capsys.readouterr().err
