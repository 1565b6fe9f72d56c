"""PyTorch's own distributed suite on the backend torchtp: exactly the tests of `upstream_passes.txt` pass."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent
SHARDS = 3  # processes that run a part of the suite each: its tests wait for polls more than they work
WAYS = {
    "plain": ([], {"any"}),
    "as gloo": (["--as-gloo"], {"any", "gloo"}),
    "with stand-ins": (["--as-gloo", "--stand-ins"], {"any", "gloo", "stand-in"}),
}


def listed():
    """(name, group, sizes) of each test that gloo passes."""
    for line in (FOLDER / "upstream_passes.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, group, sizes = line.split()
            yield name, group, {int(size) for size in sizes.split(",")}


def outcomes_of(folder, flags, size, names=None, shards=SHARDS):
    """Outcome by test, of `names` or of the whole suite."""
    processes = []
    for index in range(shards):
        shard = folder / str(index)
        shard.mkdir()
        command = [sys.executable, FOLDER / "upstream_suite.py", *flags, "--size", str(size), "--out", shard / "out"]
        command += ["--shard", str(index), str(shards), *(["--tests", *names] if names else [])]
        with open(shard / "log", "w") as log:
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
            processes.append(subprocess.Popen(command, cwd=shard, stdout=log, stderr=log, env=environment))
    outcomes = {}
    try:
        for index, process in enumerate(processes):
            assert process.wait() == 0, (folder / str(index) / "log").read_text()[-5000:]
            outcomes |= json.loads((folder / str(index) / "out").read_text())
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return outcomes


def passing(outcomes):
    return {name for name, outcome in outcomes.items() if outcome == "passed"}


def check(outcomes, groups, size, folder, names=None):
    if torch.__version__.startswith("2.13."):
        wanted = {name for name, group, sizes in listed() if group in groups and size in sizes}
    else:  # what gloo passes there, less what the list says cannot be
        (folder / "gloo").mkdir()
        names = names and [name for name in names if name in outcomes]
        wanted = passing(outcomes_of(folder / "gloo", ["--backend", "gloo"], size, names))
        wanted -= {name for name, group, _ in listed() if group not in groups}
    passed = passing(outcomes)
    lost = {name: outcomes.get(name, "is not in the suite") for name in wanted - passed}
    assert not lost, "\n".join(f"{name} {outcome}" for name, outcome in lost.items())
    assert passed == wanted, f"not listed: {sorted(passed - wanted)}"


@pytest.mark.parametrize("way", ["plain", "with stand-ins"])
def test_two_ranks_pass_what_gloo_passes(way, tmp_path):
    flags, groups = WAYS[way]
    names = [name for name, _, sizes in listed() if 2 in sizes]  # the closed ones too: they must stay closed
    check(outcomes_of(tmp_path, flags, 2, names), groups, 2, tmp_path, names)


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_whole_suite_passes_what_gloo_passes(size, way, tmp_path):
    flags, groups = WAYS[way]
    check(outcomes_of(tmp_path, flags, size), groups, size, tmp_path)


@pytest.mark.long
def test_spawned_ranks_pass_what_gloo_passes(tmp_path):
    names = [name for name, _, sizes in listed() if 2 in sizes]
    check(outcomes_of(tmp_path, ["--as-gloo", "--start", "spawn"], 2, names), {"any", "gloo"}, 2, tmp_path, names)


@pytest.mark.long
@pytest.mark.parametrize("size", [2, 4, 8])
def test_gloo_passes_what_is_listed(size, tmp_path):
    every = {"any", "gloo", "stand-in", "closed"}
    check(outcomes_of(tmp_path, ["--backend", "gloo"], size), every, size, tmp_path)
