"""Compiles and runs tests/cpp/*_test.cpp: the floors without torch, ranks as threads, under sanitizers."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent / "cpp"
BUILD = HERE.parents[1] / "build" / "cpp"
SANITIZERS = {"address": "address,undefined", "thread": "thread", "none": "none"}
TESTS = sorted(path.stem for path in HERE.glob("*_test.cpp"))
# Forked ranks: the thread sanitizer sees nothing of what is between them.
PROCESSES = {"chaos_test", "deadlock_test", "hostile_test", "outside_wait_test", "whereabouts_test"}
FIBERS = {"protocol_test"}  # one thread that changes stacks; sanitizers can't follow
# In a program of one thread the thread sanitizer finds nothing, at five times the price.
HAS_THREADS = re.compile(r'#include (?:"(?:ranks|exchange_kinds)\.h"|<thread>)')


def _sanitizers(name: str) -> list[str]:
    if name in FIBERS:
        return ["none"]
    threads = name not in PROCESSES and HAS_THREADS.search((HERE / f"{name}.cpp").read_text())
    return ["address", "thread"] if threads else ["address"]


def _make(names: list[str], sanitizer: str, *flags: str) -> subprocess.CompletedProcess[str]:
    include = Path(torch.__file__).parent / "include"
    variables = [f"SANITIZER={SANITIZERS[sanitizer]}", f"BUILD={_folder(sanitizer)}", f"TORCH_INCLUDE={include}"]
    command = ["make", "-s", f"-j{os.cpu_count()}", *flags, "-C", HERE, *names, *variables]
    return subprocess.run(command, capture_output=True, text=True)


def _folder(sanitizer: str) -> Path:
    return BUILD / SANITIZERS[sanitizer].replace(",", "-")


@pytest.fixture(scope="module")
def build_all_that_will_run(request):
    """Side by side, as one test compiles on one core; what does not compile is told by its own test."""
    asked = [item.callspec.params for item in request.session.items if item.path == request.path]
    for sanitizer in SANITIZERS:
        names = [each["name"] for each in asked if each["sanitizer"] == sanitizer]
        if names:
            _make(names, sanitizer, "-k")


@pytest.mark.skipif(not (shutil.which("make") and shutil.which("g++")), reason="needs make and a C++ compiler")
@pytest.mark.timeout(2700)  # the first one compiles for all
@pytest.mark.usefixtures("build_all_that_will_run")
@pytest.mark.parametrize(
    ("name", "sanitizer"),
    [(name, kind) for name in TESTS for kind in _sanitizers(name)],
)
def test_cpp(name, sanitizer):
    built = _make([name], sanitizer)
    assert built.returncode == 0, built.stdout + built.stderr
    program = _folder(sanitizer) / "tests" / "cpp" / name
    environment = os.environ | {"TSAN_OPTIONS": "halt_on_error=1", "ASAN_OPTIONS": "detect_leaks=1"}
    done = subprocess.run([program], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
