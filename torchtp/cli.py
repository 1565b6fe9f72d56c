"""The `torchtp` command: what this build and this machine can do."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable
from typing import Any

EPILOG = "Training itself is started with torchrun, like any other PyTorch script."


def info() -> dict[str, Any]:
    """What this build is for and what this machine offers, as plain values."""
    import torch
    import torch.distributed as dist

    import torchtp
    from torchtp import _extension

    built = _extension.built_for(_extension.find())
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    ops = sorted(
        {name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names() if _is_ours(name)}
    )
    return {
        "torchtp": torchtp.__version__,
        "build": f"CUDA {built.cuda}" if built.cuda else "CPU",
        "built for torch": built.torch,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)),
        "compiler": shutil.which(os.environ.get("CXX", "c++").split()[-1]) is not None,
        "GPUs": gpus,
        "backends": sorted(name for name in dist.Backend.backend_list if _works(dist, name)),
        "ops": ops,
    }


def _is_ours(name: str) -> bool:
    return name.startswith("torchtp::")


def _works(dist: Any, name: str) -> bool:
    available: dict[str, Callable[[], bool]] = {
        "undefined": lambda: False,
        "gloo": dist.is_gloo_available,
        "nccl": dist.is_nccl_available,
        "mpi": dist.is_mpi_available,
        "ucc": dist.is_ucc_available,
        "xccl": getattr(dist, "is_xccl_available", lambda: False),
    }
    return available.get(name, lambda: True)()


def _show_info(arguments: argparse.Namespace) -> int:
    facts = info()
    if arguments.json:
        print(json.dumps(facts, indent=1))
        return 0
    for name, value in facts.items():
        if isinstance(value, bool):
            value = "found" if value else "not found"
        text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        print(f"{name:<16} {text or 'none'}")
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line: `torchtp info [--json]`, `torchtp --version`."""
    root = argparse.ArgumentParser(prog="torchtp", description=__doc__, epilog=EPILOG)
    root.add_argument("--version", action="store_true", help="print the version and exit")
    commands = root.add_subparsers(title="commands", metavar="COMMAND")
    command = commands.add_parser(
        "info",
        help="what this build is for and what this machine offers",
        description="Print what torchtp was built for, the torch, Python, cores and GPUs found, the process-group "
        "backends that can be used and the ops torchtp registers. Exits with 1 if torchtp cannot be loaded.",
    )
    command.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    command.set_defaults(run=_show_info)
    return root


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status (1: torchtp cannot be loaded here, 2: not understood)."""
    root = parser()
    wish = root.parse_args(arguments)
    try:
        if wish.version:
            import torchtp

            print(torchtp.__version__)
            return 0
        if not hasattr(wish, "run"):
            root.print_help()
            return 2
        status: int = wish.run(wish)
        return status
    except ImportError as error:
        print(f"torchtp: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
