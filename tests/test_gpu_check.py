"""The command for a card, without one: its guards, its page, and every part's program on tiny shapes on the CPU."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu import guard, networks, page, part, ranks, targets, tests, timing
from benchmarks.gpu.smooth import Smooth
from torchtp.testing import timeout_scale

ROOT = Path(__file__).parents[1]
MISBEHAVING = """
import os, time
from benchmarks.gpu.part import main

def fail(): raise ValueError("on purpose")
def crash(): os.abort()
def hang(): time.sleep(1000)

def run(part, options):
    part.case("first", lambda: {"figure": 1})
    part.case("fails", fail)
    part.case("crashes", crash)
    part.case("hangs", hang, seconds=1)
    part.case("last", lambda: {"figure": 2})

main(__doc__, run)
"""


def test_a_case_that_fails_crashes_or_hangs_loses_nothing_else(tmp_path, monkeypatch):
    (tmp_path / "misbehaving.py").write_text(MISBEHAVING)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr(gpu_check, "_LEAST_SECONDS", 1)
    piece = gpu_check.Piece("bad", 120, "misbehaving")
    found = gpu_check.run_piece(piece, tmp_path, tmp_path / "log", 120, dry=True)
    rows = {row["case"]: row for row in found["rows"]}
    assert rows["first"]["figure"] == 1 and rows["last"]["figure"] == 2
    assert "on purpose" in rows["fails"]["error"]
    assert "took its process" in rows["crashes"]["error"] and "took its process" in rows["hangs"]["error"]
    assert found["starts"] == 3 and found["ending"] == "done"


@pytest.mark.parametrize(
    "kinked",
    [
        torch.nn.ReLU(inplace=True),
        torch.nn.ReLU6(),
        torch.nn.LeakyReLU(),
        torch.nn.Hardswish(),
        torch.nn.Hardsigmoid(),
        torch.nn.Hardtanh(),
        torch.nn.MaxPool2d(3, 2, padding=1, ceil_mode=True),
        torch.relu,
        torch.Tensor.relu,
    ],
    ids=str,
)
def test_gradients_without_kinks_move_as_little_as_their_input(kinked):
    values = torch.rand(1, 2, 7, 6, dtype=torch.float64)
    values[..., 1::2] = values[..., ::2]  # neighbours that are nearly equal
    values[:, :1] = torch.tensor([0.0, 3.0, -3.0, 6.0, 1.0, -1.0], dtype=torch.float64)

    def gradient(noise: torch.Tensor) -> torch.Tensor:
        x = (values + noise).requires_grad_()
        out = kinked(x * 1)
        (grad,) = torch.autograd.grad((out * torch.arange(out.numel()).view(out.shape)).sum(), x)
        return grad

    noise = 1e-9 * (torch.rand(values.shape, dtype=torch.float64) - 0.5)
    assert (gradient(noise) - gradient(-noise)).abs().max() > 1e-2, "it has no kink here"
    shape = kinked(values).shape
    with Smooth():
        assert kinked(values).shape == shape
        assert (gradient(noise) - gradient(-noise)).abs().max() < 1e-6


@pytest.mark.parametrize("module", [ranks, networks])
def test_a_case_of_ranks_has_longer_than_its_ranks_on_a_slow_machine_too(module, monkeypatch):
    limits = []

    class Noted:
        dry = True

        def case(self, name, run, seconds=30.0):
            limits.append((seconds, run()))

    monkeypatch.setattr(module, "on_ranks", lambda *args, timeout=35.0: timeout)
    monkeypatch.setattr(networks, "installed", lambda library: True)
    monkeypatch.setenv("TORCHTP_TIMEOUT_SCALE", "4")
    module.run(Noted(), None)
    assert limits and all(seconds > 4 * timeout for seconds, timeout in limits)


def test_parts_are_added_to_a_run_of_the_same_commit_alone(tmp_path):
    about = {"commit": "abc", "torch": "2", "python": "3", "dry_run": False, "seconds": 7}
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"about": about, "parts": [{"name": "ranks"}, {"name": "tests"}]}))
    found = gpu_check.earlier(path, about, ["tests", "sanitizer"])
    assert [part["name"] for part in found["parts"]] == ["ranks"] and found["about"] == about
    with pytest.raises(ValueError, match="commit abc, and this run of def"):
        gpu_check.earlier(path, {**about, "commit": "def"}, [])


def test_what_is_not_built_is_built_first(tmp_path, monkeypatch):
    log = tmp_path / "log"
    assert gpu_check.build_if_needed(log, 100, dry=True) is None  # this one is built
    monkeypatch.setattr(gpu_check, "_READY", "raise SystemExit({dry})")
    monkeypatch.setattr(gpu_check, "_BUILD", ("-c", "import os; print('jobs', os.environ['MAX_JOBS'])"))
    built = gpu_check.build_if_needed(log, 100, dry=True)
    assert built["ending"] == "done" and "error" not in built["rows"][0] and "jobs" in log.read_text()
    monkeypatch.setattr(gpu_check, "_BUILD", ("-c", "raise SystemExit(7)"))
    assert "status 7" in gpu_check.build_if_needed(log, 100, dry=True)["rows"][0]["error"]


def test_a_command_over_its_time_is_ended_with_all_it_started(tmp_path):
    log = tmp_path / "log"
    program = (
        "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'])\n"
    )
    limit = 2.0 * timeout_scale()  # in which the child has to start
    ending = guard.run([sys.executable, "-c", program + "print(p.pid, flush=True); time.sleep(99)"], log, limit)
    assert ending.timed_out and ending.seconds < 10 * limit
    child = int(log.read_text().split()[-1])
    state = Path(f"/proc/{child}/stat")
    deadline = time.monotonic() + 30
    while state.exists() and state.read_text().rsplit(")", 1)[1].split()[0] != "Z":
        assert time.monotonic() < deadline, "the command's child lives on"
        time.sleep(0.01)


def test_what_pytest_prints_is_understood():
    log = "tests/test_cuda.py::test_a[1-x] PASSED [ 1%]\ntests/test_cuda.py::test_b FAILED [ 2%]\n"
    assert tests.outcomes(log) == {
        "passed": ["tests/test_cuda.py::test_a[1-x]"],
        "failed": ["tests/test_cuda.py::test_b"],
    }
    assert tests.files("kernels") == ["tests/test_cuda.py", "tests/test_cuda_gradients.py"]
    assert all((ROOT / file).exists() for kind in ("exchanges", "rules") for file in tests.files(kind))


def _figures():
    """Rows as a card would leave them: some targets reached, some not."""
    times = {"forward": 1e-4, "input": 1e-4, "weight": 1e-4}
    layouts = {"channels first": times, "channels last": times}

    def scaled(factor):
        return {layout: {name: factor * taken for name, taken in times.items()} for layout in layouts}

    step = {"compiled": False, "first_step_s": 9.0, "last_loss": 6.9, "peak_reserved_GiB": 50.0}
    return [
        {"case": "card", "name": "a card"},
        {"case": "copy", "bytes_per_s": 4e12},
        {"case": "fma fp32", "flop_per_s": 6e13},
        {"case": "d", "kind": "depthwise", "stage": 1, "dtype": "bf16", "flop_a_pass": 4e9, "bytes_a_pass": 1e8,
         "ours": layouts, "with_halos": scaled(1.02), "theirs": scaled(6)},
        {"case": "l", "kind": "layer norm", "stage": 1, "dtype": "fp32", "bytes": {"forward": 4e8, "backward": 2e8},
         "ours": {"channels first": {"forward": 1e-4, "backward": 1e-4}},
         "theirs": {"channels first": {"forward": 2e-4, "backward": 2e-4}}},
        {"case": "n", "kind": "depthwise layer norm", "layout": "channels last", "stage": 1, "dtype": "bf16", "flop": {"forward": 3e9},
         "bytes": {"forward": 3e8}, "ours": {"forward": 1e-4}, "one_launch": {"forward": 1.5e-4}, "theirs": {"forward": 4e-4}},
        {"case": "h", "kind": "halo pack", "what": "small", "bytes": 1000, "moved": 2000, "ours": {"pack": 6e-6},
         "theirs": {"narrow and copy": 1e-5}},
        {"case": "k", "kind": "dense convolution", "what": "3x3", "dtype": "bf16", "bytes": 2**26,
         "ways": {way: {"forward": 1e-4, "backward": 3e-4} for way in ("laid", "border", "alone")}},
        {"case": "a", "variant": "(a) reference", "precision": "fp32", "step_s": 2.0, "peak_allocated_GiB": 43.0, **step},
        {"case": "a2", "variant": "(a) reference, checkpointed", "precision": "fp32", "step_s": 1.0,
         "peak_allocated_GiB": 11.0, **step},
        {"case": "c", "variant": "(c) torchtp", "precision": "fp32", "step_s": 1.0, "peak_allocated_GiB": 25.8, **step},
        {"case": "e", "errors": {"output": 1e-6}, "bounds": {"output": 2e-5}},
        {"case": "t", "passed": 3, "not_run": 1},
        {"case": "s", "kind": "other", "by_events": ["not | permitted"]},
        {"case": "w", "error": "wrong | and\nlong"},
    ]  # fmt: skip


def test_the_page_compares_figures_with_targets():
    about = {"date": "2026-01-01", "torch": "2.11.0", "python": "3.12", "commit": "x"}
    results = {"about": about, "parts": [{"name": "all", "ending": "done", "rows": _figures()}]}
    found = {outcome.target.what: outcome for outcome in targets.outcomes(results)}
    verdicts = [outcome.verdict for outcome in found.values()]
    assert verdicts == [
        "reached",
        "reached",
        "reached",
        "reached by 1 of 2",
        "",
        "missed",
        "",
        "reached",
        "reached",
        "",
    ]
    assert found["the article's step: memory over the reference"].figures == [pytest.approx(0.6)]
    made = page.text(results)
    assert "3x3, bf16, 64 MiB, backward | 300.0 | 300.0 | 300.0 | 1.00" in made
    assert "a card" in made and "wrong / and long" in made
    assert "all, s: 1 figures have the host's time in them, not captured: `not / permitted`" in made
    assert "| stage 1, bf16, channels last, forward | 100.0 | 150.0 | 400.0 | 4.00 | 75% |" in made
    assert not page.all_well(results)
    results["about"]["dry_run"] = True
    assert not any(outcome.figures for outcome in targets.outcomes(results))


def test_parts_of_an_earlier_run_say_which_one_it_was():
    def run(commit, *names):
        about = {"commit": commit, "date": "2026-01-02", "torch": "2.11.0", "python": "3.12"}
        return {"about": about, "parts": [{"name": name, "ending": "done", "rows": []} for name in names]}

    both = page.filled(run("new", "tests", "ranks"), run("old", "tests", "ranks", "article"), ["ranks", "article"])
    assert [(part["name"], part.get("of")) for part in both["parts"]] == [
        ("tests", None), ("ranks", "old, 2026-01-02"), ("article", "old, 2026-01-02"),
    ]  # fmt: skip
    assert "| article | done (of old, 2026-01-02) |" in page.text(both)
    with pytest.raises(ValueError, match="no part sanitizer"):
        page.filled(run("new"), run("old", "tests"), ["sanitizer"])


def test_what_cannot_be_captured_is_timed_by_events_and_says_so(monkeypatch):
    clock = timing.Timer(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(timing.Timer, "_stream", None)
    monkeypatch.setattr(timing, "_warm_up", lambda runs: 1e-4)
    monkeypatch.setattr(timing, "_elapsed", lambda runs, repeats: [run() for run in runs])
    calls = timing.calls_of_graph(2, 1e-4)
    assert calls == 16

    def captured(self, runs, calls):
        if runs[0]() == 7.0:
            raise RuntimeError("operation not permitted\nwhen stream is capturing")
        return lambda: sum(runs[call % 2]() for call in range(calls))

    monkeypatch.setattr(timing.Timer, "_captured", captured)

    def measure(clock, first, second):
        return {"taken": clock.seconds([lambda: first, lambda: second])}

    assert clock.row(measure, 7.0, 9.0) == {"taken": 8.0, "by_events": ["operation not permitted"]}
    assert clock.row(measure, 1.0, 3.0) == {"taken": 2.0}


def test_a_graph_is_long_and_of_whole_rounds():
    assert [timing.calls_of_graph(*one) for one in ((16, 1e-6), (1, 1e-6), (3, 1e-2), (5, 1e-4))] == [64, 64, 3, 15]


def test_the_committed_page_is_made_of_the_committed_results():
    assert page.PAGE.read_text() == page.performance()


def test_rows_survive_a_line_cut_off_by_a_crash(tmp_path):
    path = tmp_path / "rows"
    path.write_text('{"case": "a", "begun": true}\n{"case": "a", "x": 1}\n{"case": "b", "be')
    assert part.read(path) == [{"case": "a", "x": 1}]


def _dry_run(out, *arguments):
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--out", str(out), "--dry-run", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    results = json.loads((out / "results.json").read_text())
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "### Targets" in (out / "results.md").read_text() and (out / "log.txt").exists()
    return {piece["name"]: piece["rows"] for piece in results["parts"]}


def test_the_kernels_times_are_taken_without_a_card_too(tmp_path):
    parts = _dry_run(tmp_path, "--only", "kernel times")
    assert {row["kind"] for row in parts["kernel times"]} == {
        "depthwise", "layer norm", "depthwise layer norm", "dense convolution", "halo pack", "bucket pack", "op",
    }  # fmt: skip


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_part_runs_without_a_card(tmp_path):
    parts = _dry_run(tmp_path, "--seconds", "800")
    assert set(parts) == {piece.name for piece in gpu_check.PIECES}
    assert all(rows for name, rows in parts.items() if name != "exchange tests")
