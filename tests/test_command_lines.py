"""Benchmarks and examples tell what they are, and refuse what they can't do in a sentence."""

import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BENCHMARKS = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "benchmarks").rglob("*.py")
    if "__main__" in path.read_text()
)


def _run(monkeypatch, capsys, arguments, start):
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr(sys, "path", [str(ROOT / "examples"), str(ROOT), *sys.path])
    with pytest.raises(SystemExit) as caught:
        start()
    return caught.value.code, capsys.readouterr()


@pytest.mark.parametrize("module", BENCHMARKS)
@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
def test_a_benchmark_tells_what_it_is(module, monkeypatch, capsys):
    if module == "benchmarks.networks":
        pytest.importorskip("tqdm")
    code, told = _run(monkeypatch, capsys, [module, "--help"], lambda: runpy.run_module(module, run_name="__main__"))
    assert code == 0
    assert "usage:" in told.out and len(told.out.splitlines()) > 3


@pytest.mark.parametrize("name", ["dense_times", "move_times", "part", "targets"])
@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
def test_what_is_no_program_names_one(name, monkeypatch, capsys):
    module = f"benchmarks.gpu.{name}"
    assert module in BENCHMARKS
    code, told = _run(monkeypatch, capsys, [module], lambda: runpy.run_module(module, run_name="__main__"))
    assert code == 2
    assert "no program of its own: start python -m benchmarks." in told.err


@pytest.mark.parametrize(
    ("program", "arguments", "message"),
    [
        ("train_convnext", ["--mesh", "w=a"], "a mesh is sizes of the axes data, h and w, each once"),
        ("train_convnext", ["--mesh", "w=2,w=2"], "a mesh is sizes of the axes data, h and w, each once"),
        ("train_convnext", ["--shape", "1,3,8"], "four positive sizes N,C,H,W"),
        ("train_convnext", ["--steps", "0"], "from 1 on, not '0'"),
        ("train_disparity", ["--steps", "0"], "from 1 on, not '0'"),
        ("train_disparity", ["--batch", "-1"], "from 1 on, not '-1'"),
        ("train_disparity", ["--scale", "0"], "a positive number, not '0'"),
        ("train_disparity", ["--mesh", "x=2"], "a mesh is sizes of the axes data, h and w, each once"),
    ],
)
def test_an_example_refuses_in_a_sentence(program, arguments, message, monkeypatch, capsys):
    pytest.importorskip("tqdm")
    path = str(ROOT / "examples" / f"{program}.py")
    code, told = _run(monkeypatch, capsys, [path, *arguments], lambda: runpy.run_path(path, run_name="__main__"))
    assert code == 2
    assert message in told.err
