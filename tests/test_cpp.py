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
PROCESSES = {"chaos_test", "hostile_test", "whereabouts_test"}
FIBERS = {"protocol_test"}  # one thread that changes stacks; sanitizers can't follow
# In a program of one thread the thread sanitizer finds nothing, at five times the price.
HAS_THREADS = re.compile(r'#include (?:"(?:ranks|exchange_kinds)\.h"|<thread>)')


def _sanitizers(name: str) -> list[str]:
    if name in FIBERS:
        return ["none"]
    threads = name not in PROCESSES and HAS_THREADS.search((HERE / f"{name}.cpp").read_text())
    return ["address", "thread"] if threads else ["address"]


def _make(target: str, sanitizer: str) -> Path:
    build = BUILD / sanitizer.replace(",", "-")
    include = Path(torch.__file__).parent / "include"
    variables = [f"SANITIZER={sanitizer}", f"BUILD={build}", f"TORCH_INCLUDE={include}"]
    done = subprocess.run(
        ["make", "-s", f"-j{os.cpu_count()}", "-C", HERE, target, *variables],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return build / "tests" / "cpp" / target


@pytest.mark.skipif(not (shutil.which("make") and shutil.which("g++")), reason="needs make and a C++ compiler")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "sanitizer"),
    [(name, kind) for name in TESTS for kind in _sanitizers(name)],
)
def test_cpp(name, sanitizer):
    program = _make(name, SANITIZERS[sanitizer])
    environment = os.environ | {"TSAN_OPTIONS": "halt_on_error=1", "ASAN_OPTIONS": "detect_leaks=1"}
    done = subprocess.run([program], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
