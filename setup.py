"""Builds the extension torchtp._C for the torch of this environment; everything else stands in pyproject.toml."""

import os
import shutil
import sys
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent.resolve()
REMEDY = (
    "torchtp is built against the torch of this environment (2.11 to 2.15) and found none: "
    "run `pip install torch setuptools wheel ninja` first, then `pip install --no-build-isolation .`"
)

try:
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension
except ImportError:
    sys.exit(REMEDY)


def torch_version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def builds_cuda() -> bool:
    """A CUDA torch and an nvcc of the same major version give the CUDA build; TORCHTP_CUDA=0/1 overrides."""
    wish = os.environ.get("TORCHTP_CUDA")
    if wish in ("0", "1"):
        if wish == "1" and torch.version.cuda is None:
            sys.exit("TORCHTP_CUDA=1 needs a CUDA build of torch, but this environment's torch is a CPU build")
        return wish == "1"
    return torch.version.cuda is not None and nvcc_major() == torch.version.cuda.split(".")[0]


def nvcc_major() -> str | None:
    from torch.utils.cpp_extension import CUDA_HOME

    nvcc = Path(CUDA_HOME) / "bin" / "nvcc" if CUDA_HOME else shutil.which("nvcc")
    if not nvcc or not Path(nvcc).exists():
        return None
    import re
    import subprocess

    text = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"release (\d+)\.", text)
    return found.group(1) if found else None


def extension() -> CppExtension:
    cuda = builds_cuda()
    suffixes = (".cpp", ".cu") if cuda else (".cpp",)
    sources = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*") if path.suffix in suffixes)
    flags = ["-O3", "-g0", "-fvisibility=hidden", "-Wall", "-Wno-unknown-pragmas", "-fopenmp"]
    flags += [f'-DTORCHTP_BUILT_FOR_TORCH="{torch.__version__.split("+")[0]}"']
    compile_args = {"cxx": flags + (["-DTORCHTP_CUDA"] if cuda else [])}
    if cuda:
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "9.0")
        compile_args["nvcc"] = [
            "-O3",
            "-DTORCHTP_CUDA",
            "--expt-relaxed-constexpr",
            "-Xcompiler",
            "-fvisibility=hidden",
        ]
    kind = CUDAExtension if cuda else CppExtension
    return kind(
        "torchtp._C",
        sources=sources,
        include_dirs=[str(ROOT / "csrc")],
        extra_compile_args=compile_args,
        extra_link_args=["-fopenmp"],
        depends=[str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.h")],
    )


if not (2, 11) <= torch_version() <= (2, 15):
    sys.exit(f"torchtp supports torch 2.11 to 2.15, but this environment has {torch.__version__}; install one of those")

setup(ext_modules=[extension()], cmdclass={"build_ext": BuildExtension})
