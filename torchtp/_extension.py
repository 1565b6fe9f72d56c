"""Loads the compiled module, or refuses it where it would crash: it fits only the torch it was built for."""

from __future__ import annotations

import importlib.machinery
import mmap
import re
from dataclasses import dataclass
from pathlib import Path

import torch

_MARK = re.compile(rb"torchtp was built for torch=([^ ;]+) cuda=([^ ;]+);")
_REMEDY = "run `pip install --no-build-isolation .` in a checkout of torchtp (`make build` there does it too)"


@dataclass(frozen=True)
class BuiltFor:
    """What the compiled module was built for; `cuda` is None in a CPU build."""

    path: Path
    torch: str
    cuda: str | None


def find() -> Path:
    """The compiled module of this Python beside this file; raises ImportError if there is none."""
    folder = Path(__file__).parent
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = folder / f"_C{suffix}"
        if path.exists():
            return path
    raise ImportError(f"torchtp is not built for this Python: {_REMEDY}")


def built_for(path: Path) -> BuiltFor:
    """Read what the compiled module at `path` was built for, without loading it; raises ImportError if it says nothing."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        found = _MARK.search(content)
        if found is None:
            raise ImportError(f"{path} is not a compiled module of torchtp: {_REMEDY}")
        version, cuda = (text.decode() for text in found.groups())
    return BuiltFor(path, version, None if cuda == "none" else cuda)


def check(built: BuiltFor, torch_version: str, torch_cuda: str | None) -> None:
    """Raise ImportError unless `built` can be loaded beside torch `torch_version` made for CUDA `torch_cuda` (or None)."""
    if torch_version.split("+")[0] != built.torch:
        raise ImportError(
            f"torchtp was built for torch {built.torch}, but torch {torch_version} is installed; "
            f"the compiled module fits one torch only: {_REMEDY}"
        )
    if built.cuda is not None and (torch_cuda or "none").split(".")[0] != built.cuda.split(".")[0]:
        raise ImportError(
            f"torchtp was built for CUDA {built.cuda}, but this torch is made for CUDA {torch_cuda or 'none'}; "
            f"their major versions must agree: {_REMEDY}"
        )


check(built_for(find()), torch.__version__, torch.version.cuda)
import torchtp._C  # noqa: E402, F401  (after torch, whose libraries it needs, and only if it fits)
