"""What ptxas says of every kernel: no register spills, no arrays in local memory, no more shared memory than there is."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

KERNELS = Path(__file__).parents[1] / "csrc" / "kernels"
SOURCES = sorted(KERNELS.glob("*.cu"))
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path=os.path.join(os.environ.get("CUDA_HOME", ""), "bin"))
ARCHITECTURE = os.environ.get("TORCHTP_PTXAS_ARCH", "sm_90")
# A block may have 48 KiB of shared memory that is known when it is compiled; ours ask for theirs when launched.
MOST_STATIC_SHARED = 16 * 1024

ENTRY = re.compile(
    r"Compiling entry function '(?P<name>\S+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.S,
)


class Kernel(NamedTuple):
    name: str
    stack: int
    spilled: int
    registers: int
    shared: int


def parse(log: str) -> list[Kernel]:
    found = []
    for entry in ENTRY.finditer(log):
        shared = re.search(r"(\d+) bytes smem", entry["rest"])
        spilled = int(entry["stores"]) + int(entry["loads"])
        found.append(
            Kernel(
                entry["name"],
                int(entry["stack"]),
                spilled,
                int(entry["registers"]),
                int(shared[1]) if shared else 0,
            )
        )
    return found


@cache
def compiled(source: Path) -> list[Kernel]:
    include = Path(torch.__file__).parent / "include"
    command = [NVCC, f"-arch={ARCHITECTURE}", "-O3", "-std=c++17", "--expt-relaxed-constexpr", "-Xptxas", "-v"]
    command += ["-I", KERNELS.parent, "-I", include, "-cubin", "-o", os.devnull, source]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    return parse(done.stdout + done.stderr)


LOG = """ptxas info    : Compiling entry function '_Z1av' for 'sm_90'
ptxas info    : Function properties for _Z1av
    {} bytes stack frame, {} bytes spill stores, 4 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 1024 bytes smem
ptxas info    : Compile time = 3.1 ms
"""


def test_the_log_is_understood():
    assert parse(LOG.format(0, 8) + LOG.format(16, 0)) == [
        Kernel("_Z1av", 0, 12, 40, 1024),
        Kernel("_Z1av", 16, 4, 40, 1024),
    ]


@pytest.mark.skipif(not NVCC, reason="needs nvcc")
def test_an_array_in_local_memory_is_seen(tmp_path):
    source = tmp_path / "local.cu"
    source.write_text(
        """__global__ void local_kernel(int* p) {
             int kept[64];
             for (int i = 0; i < 64; ++i) kept[p[i] & 63] = i;
             for (int i = 0; i < 64; ++i) p[i] = kept[i] + kept[p[i] & 63];
           }"""
    )
    assert [kernel.stack >= 256 for kernel in compiled(source)] == [True]


@pytest.mark.skipif(not NVCC, reason="needs nvcc")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_kernels_keep_their_numbers_in_registers(source):
    kernels = compiled(source)
    assert kernels, f"{source.name} has no kernel"
    spilling = [kernel for kernel in kernels if kernel.spilled or kernel.stack]
    assert not spilling, spilling
    crowded = [kernel for kernel in kernels if kernel.shared > MOST_STATIC_SHARED]
    assert not crowded, crowded


if __name__ == "__main__":  # the table of docs/cuda.md
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for path, kernels in zip(SOURCES, pool.map(compiled, SOURCES), strict=True):
            for kernel in kernels:
                print(path.stem, kernel.registers, kernel.stack, kernel.spilled, kernel.shared, kernel.name)
