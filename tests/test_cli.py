import json

import pytest
import torch

import torchtp
from torchtp import _extension, cli


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


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == torchtp.__version__ + "\n"


def test_without_a_command_help_is_shown(capsys):
    assert cli.main([]) == 2
    assert "info" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--help"], ["info", "--help"]])
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
