"""What ptxas made of every kernel of this build: no register spills, no arrays in local memory, no more shared memory than there is."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest

from torchtp import _C

# A block may have 48 KiB of shared memory that is known when it is compiled; ours ask for theirs when launched.
MOST_STATIC_SHARED = 16 * 1024
IS_CUDA = b"cuda=none;" not in Path(_C.__file__).read_bytes()


def _tool(name: str) -> str | None:
    """From PATH or the toolkit; cuobjdump also comes with triton, which every CUDA torch brings."""
    places = [os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin")]
    if triton := importlib.util.find_spec("triton"):
        places.append(str(Path(triton.origin or "").parent / "backends" / "nvidia" / "bin"))
    return next((found for place in [None, *places] if (found := shutil.which(name, path=place))), None)


NVCC, CUOBJDUMP = _tool("nvcc"), _tool("cuobjdump")

ARCHITECTURE = re.compile(r"^arch = (\w+)", re.M)
KERNEL = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


class Kernel(NamedTuple):
    architecture: str
    name: str
    registers: int
    stack: int  # spilled registers and local arrays
    shared: int


def parse(text: str) -> list[Kernel]:
    found = []
    _, *parts = ARCHITECTURE.split(text)
    for architecture, part in zip(parts[::2], parts[1::2], strict=True):
        for name, registers, stack, shared, local in KERNEL.findall(part):
            found.append(Kernel(architecture, name, int(registers), int(stack) + int(local), int(shared)))
    return found


def kernels_of(binary: Path) -> list[Kernel]:
    assert CUOBJDUMP
    done = subprocess.run([CUOBJDUMP, "-res-usage", binary], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return parse(done.stdout)


def test_the_text_is_understood():
    text = """
Fatbin elf code:
arch = sm_90
Resource usage:
 Common:
  GLOBAL:0
 Function _Z1av:
  REG:40 STACK:16 SHARED:1024 LOCAL:0 CONSTANT[0]:552 TEXTURE:0 SURFACE:0 SAMPLER:0
Fatbin elf code:
arch = sm_120
 Function _Z1bv:
  REG:31 STACK:0 SHARED:0 LOCAL:8 CONSTANT[0]:552 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
    assert parse(text) == [Kernel("sm_90", "_Z1av", 40, 16, 1024), Kernel("sm_120", "_Z1bv", 31, 8, 0)]


@pytest.mark.skipif(not NVCC or not CUOBJDUMP, reason="needs nvcc and cuobjdump")
def test_an_array_in_local_memory_is_seen(tmp_path):
    source, binary = tmp_path / "local.cu", tmp_path / "local.fatbin"
    source.write_text(
        """__global__ void local_kernel(int* p) {
             int kept[64];
             for (int i = 0; i < 64; ++i) kept[p[i] & 63] = i;
             for (int i = 0; i < 64; ++i) p[i] = kept[i] + kept[p[i] & 63];
           }"""
    )
    subprocess.run([NVCC, "-arch=sm_90", "-fatbin", "-o", binary, source], check=True, timeout=120)
    assert [kernel.stack >= 256 for kernel in kernels_of(binary)] == [True]


@pytest.mark.skipif(not IS_CUDA, reason="needs a CUDA build")
def test_kernels_keep_their_numbers_in_registers():
    kernels = kernels_of(Path(_C.__file__))
    assert kernels
    wrong = [kernel for kernel in kernels if kernel.stack or kernel.shared > MOST_STATIC_SHARED]
    assert not wrong, wrong


def table(kernels: list[Kernel]) -> list[str]:
    """Lines of the table of docs/cuda.md: program, variants, registers."""
    programs = defaultdict(list)
    for kernel in kernels:  # names stand in a mangled name behind their lengths; types begin with a capital
        names = (found[2][: int(found[1])] for found in re.finditer(r"(?<!\d)(?=(\d+)(\w+))", kernel.name))
        programs[next(name for name in names if name[:1].isupper())].append(kernel.registers)
    return [f"| `{name}` | {len(used)} | {min(used)} to {max(used)} |" for name, used in sorted(programs.items())]


if __name__ == "__main__":
    print(*table(kernels_of(Path(_C.__file__))), sep="\n")
