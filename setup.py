"""Builds the extension torchtp._C for the torch of this environment; everything else stands in pyproject.toml."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from setuptools import setup

ROOT = Path(__file__).parent.resolve()
OLDEST, NEWEST = (2, 11), (2, 15)
# Of the 20 s that a file of these floors takes to compile, torch's headers are 16: several files are read in one go.
UNITED = ("backend", "bindings", "gradients", "spatial")
FILES_A_UNIT = int(os.environ.get("TORCHTP_FILES_A_UNIT", "12"))
SUPPORTED = ".".join(map(str, OLDEST)) + " to " + ".".join(map(str, NEWEST))


def refuse(sentence: str) -> None:
    sys.exit(f"\n{sentence}\n")


def check_torch() -> None:
    """One sentence instead of a traceback when there is no torch, or one we do not know."""
    try:
        import torch
    except ImportError:
        refuse(
            f"torchtp is built for the torch already installed here (any of {SUPPORTED}) and found none: run "
            "`pip install torch setuptools wheel ninja`, then `pip install --no-build-isolation .`"
        )
        return
    if not OLDEST <= tuple(int(part) for part in torch.__version__.split(".")[:2]) <= NEWEST:
        refuse(f"torchtp supports torch {SUPPORTED}, but {torch.__version__} is installed here: install one of those")


def builds_cuda() -> bool:
    """A CUDA torch and an nvcc of the same major version give the CUDA build; TORCHTP_CUDA=0/1 overrides."""
    import torch

    wish = os.environ.get("TORCHTP_CUDA", "")
    if wish not in ("", "0", "1"):
        refuse(f"TORCHTP_CUDA is 0 (CPU build), 1 (CUDA build) or unset (decide by torch and nvcc), but it is {wish!r}")
    if wish == "1" and torch.version.cuda is None:
        refuse("TORCHTP_CUDA=1 asks for a CUDA build, but the torch installed here is a CPU one: install a CUDA torch")
    if wish == "1" and nvcc_major() is None:
        refuse("TORCHTP_CUDA=1 asks for a CUDA build, but there is no nvcc: put it on PATH or set CUDA_HOME")
    if wish:
        return wish == "1"
    return torch.version.cuda is not None and nvcc_major() == torch.version.cuda.split(".")[0]


def find_toolkit() -> None:
    """Set CUDA_HOME from what nvcc says of itself: torch guesses from nvcc's path, which may be a script elsewhere."""
    nvcc = shutil.which("nvcc")
    if nvcc is None or os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"):
        return
    told = subprocess.run([nvcc, "--dryrun", "-x", "cu", "-c", os.devnull], capture_output=True, text=True, check=False)
    if found := re.search(r"^#\$ _?TOP=(.+)$", told.stderr, re.M):
        os.environ["CUDA_HOME"] = os.path.realpath(found.group(1).strip())


def nvcc_major() -> str | None:
    find_toolkit()
    from torch.utils.cpp_extension import CUDA_HOME

    nvcc = shutil.which("nvcc", path=os.path.join(CUDA_HOME, "bin")) if CUDA_HOME else shutil.which("nvcc")
    if nvcc is None:
        return None
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"release (\d+)\.", text)
    return found.group(1) if found else None


def sources(*suffixes: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*") if path.suffix in suffixes)


def united(folder: Path, paths: list[str]) -> list[str]:
    """`paths`, but those of a floor above torch's headers as files in `folder` that include FILES_A_UNIT of them each."""
    single = [path for path in paths if path.split("/")[1] not in UNITED]
    for floor in UNITED:
        mine = [path for path in paths if path.split("/")[1] == floor]
        for start in range(0, len(mine), FILES_A_UNIT):
            unit = folder / f"{floor}_{start // FILES_A_UNIT}.cpp"
            text = "".join(f'#include "{path.removeprefix("csrc/")}"\n' for path in mine[start : start + FILES_A_UNIT])
            if not unit.exists() or unit.read_text() != text:  # a newer file would be compiled again
                unit.parent.mkdir(parents=True, exist_ok=True)
                unit.write_text(text)
            single.append(str(unit.relative_to(ROOT)))
    return single


def build_arguments() -> dict[str, Any]:
    cuda = builds_cuda()  # first: it sets CUDA_HOME, which torch reads when its builder is imported

    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension

    version = torch.__version__.split("+")[0]
    defines = [f'-DTORCHTP_BUILT_FOR_TORCH="{version}"']
    if cuda:
        # Without a GPU to ask torch would build for every architecture it knows.
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "9.0")
        defines += ["-DTORCHTP_CUDA", f'-DTORCHTP_BUILT_FOR_CUDA="{torch.version.cuda}"']
    flags = ["-O3", "-g0", "-fvisibility=hidden", "-Wall", "-Wno-unknown-pragmas", "-fopenmp"]
    nvcc_flags = ["-O3", "--expt-relaxed-constexpr", "-Xcompiler", "-fvisibility=hidden"]
    place = (
        ROOT
        / "build"
        / f"{sysconfig.get_platform()}-{sys.implementation.cache_tag}-torch{version}-{'cuda' if cuda else 'cpu'}"
    )
    extension = (CUDAExtension if cuda else CppExtension)(
        "torchtp._C",
        sources=united(place / "units", sources(".cpp")) + (sources(".cu") if cuda else []),
        depends=sources(".h", ".cpp"),
        include_dirs=[str(ROOT / "csrc")],
        extra_compile_args={"cxx": flags + defines, "nvcc": nvcc_flags + defines},
        extra_link_args=["-fopenmp"],
    )

    class Build(BuildExtension):
        def finalize_options(self) -> None:
            super().finalize_options()
            # Objects stay where the next build finds them: an editable install would use a temporary folder.
            self.build_temp = str(place)

    return {"ext_modules": [extension], "cmdclass": {"build_ext": Build}}


if {"sdist", "egg_info"} & set(sys.argv):
    setup()
else:
    check_torch()
    setup(**build_arguments())
