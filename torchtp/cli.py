"""The `torchtp` command: what this build and this machine can do, and what a training step would cost on a mesh."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable
from typing import Any

DTYPES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
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
        "compiler": shutil.which(_compiler(os.environ.get("CXX", ""))) is not None,
        "GPUs": gpus,
        "halos on GPUs": _halos_on_gpus(built.cuda, len(gpus)),
        "backends": sorted(name for name in dist.Backend.backend_list if _works(dist, name)),
        "ops": ops,
    }


def _compiler(words: str) -> str:
    """The program in what CXX may say: "ccache g++ -m64"."""
    return ["c++", *(word for word in words.split() if not word.startswith("-"))][-1]


def _halos_on_gpus(cuda: str | None, count: int) -> str:
    """How halos travel between ranks that have one of this machine's GPUs each, and why not better."""
    import torch
    import torch.distributed as dist

    from torchtp import _C

    if not cuda:
        return "none: this build is for the CPU"
    if count == 0:
        return "none: no GPU here"
    names = [str(index) for index in range(count)]
    ranks = [
        {
            "device": name,
            "seen": names,
            "reachable": [other for other in names if other != name and _reaches(torch.cuda, name, other)],
            "symmetric_memory": True,
            "grouped": dist.is_nccl_available(),
            "wish": os.environ.get("TORCHTP_DEVICE_EXCHANGE") or "auto",
        }
        for name in names
    ]
    try:
        kind, why = _C.choose_device_exchange(ranks)
    except RuntimeError as error:
        return str(error)
    return f"{kind} ({why})" if why else kind


def _reaches(cuda: Any, device: str, other: str) -> bool:
    return bool(cuda.can_device_access_peer(int(device), int(other)))


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


def plan(
    network: str,
    shapes: list[tuple[int, ...]],
    meshes: list[dict[str, int]],
    *,
    arguments: dict[str, Any] | None = None,
    dtype: str | None = None,
    evaluates: bool = False,
) -> list[Any]:
    """What `torchtp.explain` tells of what "package.module:callable" makes of the arguments, for each mesh."""
    import torch

    import torchtp
    from torchtp import named

    module = named.made(network, arguments or {})
    module.train(not evaluates)
    kind = getattr(torch, DTYPES[dtype]) if dtype else None
    shape = shapes[0] if len(shapes) == 1 else shapes
    return [torchtp.explain(module, shape, mesh, dtype=kind) for mesh in meshes]


def _mesh(text: str) -> dict[str, int]:
    try:
        pairs = [(name.strip(), int(size)) for name, size in (part.split("=") for part in text.split(","))]
    except ValueError:
        raise argparse.ArgumentTypeError(f"a mesh is written as h=2,w=2 or data=2,w=4, not {text!r}") from None
    mesh = dict(pairs)
    if len(mesh) < len(pairs):
        raise argparse.ArgumentTypeError(f"an axis of a mesh has one size, but one stands twice in {text!r}")
    if min(mesh.values()) < 1:
        raise argparse.ArgumentTypeError(f"an axis of a mesh has at least one rank, but it is {text!r}")
    return mesh


def _shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(extent) for extent in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"a shape is written as 1,3,2160,3840, not {text!r}") from None
    if min(shape) < 1:
        raise argparse.ArgumentTypeError(f"extents of a shape are positive, but it is {text!r}")
    return shape


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"it is a whole number from 1 on, not {text!r}")
    return number


def _argument(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"an argument is written as name=value, not {text!r}")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def _show_plan(arguments: argparse.Namespace) -> int:
    from torchtp.planning.explanation import compared

    try:
        told = plan(
            arguments.network,
            arguments.shape,
            arguments.mesh,
            arguments=dict(arguments.argument),
            dtype=arguments.dtype,
            evaluates=arguments.eval,
        )
    except ValueError as error:
        print(f"torchtp: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps([dataclasses.asdict(each) for each in told], indent=1, default=str))
        return 0
    print(compared(told))
    if arguments.details:
        for each in told:
            print(f"\n{each}")
    return 0


def _show_bench(arguments: argparse.Namespace) -> int:
    import torch

    from torchtp import bench

    if (arguments.network is None) != (not arguments.mesh) or (arguments.network is None) != (not arguments.shape):
        print("torchtp: bench takes a network with --shape and --mesh, or none of them", file=sys.stderr)
        return 2
    if arguments.network is None and (arguments.argument or arguments.dtype):
        print(
            "torchtp: bench takes --argument and --dtype with a network: without one calls are of fp32", file=sys.stderr
        )
        return 2
    if arguments.network is not None and arguments.ranks is not None:
        print(
            "torchtp: bench takes --ranks without a network: with one, --mesh says how many they are", file=sys.stderr
        )
        return 2
    ranks = 2 if arguments.ranks is None else arguments.ranks
    repeat = {} if arguments.repeat is None else {"repeat": arguments.repeat}
    try:
        if arguments.network is None:
            measured: list[Any] = bench.calls(ranks, **repeat)
        else:
            kind = getattr(torch, DTYPES[arguments.dtype]) if arguments.dtype else None
            work: dict[str, Any] = {"arguments": dict(arguments.argument), "dtype": kind, **repeat}
            measured = [bench.steps(arguments.network, arguments.shape, mesh, **work) for mesh in arguments.mesh]
    except ValueError as error:
        print(f"torchtp: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps([dataclasses.asdict(each) for each in measured], indent=1))
    elif arguments.network is None:
        print(f"Between {ranks} processes of this machine, fp32\n{bench.table_of_calls(measured)}")
    else:
        print(
            f"A training step on this machine's {len(os.sched_getaffinity(0))} cores\n{bench.table_of_steps(measured)}"
        )
    return 0


def _show_trace(arguments: argparse.Namespace) -> int:
    from torchtp.observe import parting

    try:
        partings = parting.read(arguments.file)
    except (OSError, ValueError) as error:
        print(f"torchtp: {error}", file=sys.stderr)
        return 2
    print("\n".join(map(parting.told, partings)) or "no process group stands in these files")
    return 1 if any(one.is_found or one.absent for one in partings) else 0


def _write_timeline(arguments: argparse.Namespace) -> int:
    from torchtp.observe import timeline

    try:
        drawn = timeline.read(arguments.file)
        with open(arguments.out, "w") as file:
            json.dump(drawn, file)
    except (OSError, ValueError) as error:
        print(f"torchtp: {error}", file=sys.stderr)
        return 2
    print(f"{arguments.out}: {timeline.told(drawn)}; open it in https://ui.perfetto.dev or chrome://tracing")
    return 0


def _take_network(command: argparse.ArgumentParser, optional: bool = False) -> None:
    """The arguments that name a network, its images and meshes."""
    command.add_argument(
        "network", metavar="MODULE:CALLABLE", nargs="?" if optional else None,
        help="what makes the torch.nn.Module when called, or is one",
    )  # fmt: skip
    command.add_argument(
        "--argument", type=_argument, action="append", default=[], metavar="NAME=VALUE",
        help="what to call it with, a Python literal or text; again for every further one",
    )  # fmt: skip
    command.add_argument(
        "--shape", type=_shape, action="append", required=not optional, metavar="N,C,H,W",
        help="of the images a data rank passes; again for every further image the network takes",
    )  # fmt: skip
    command.add_argument(
        "--mesh", type=_mesh, action="append", required=not optional, metavar="h=2,w=2",
        help="number of ranks that cut H, W, D (h, w, d), and of data ranks (data); again for every mesh to compare",
    )  # fmt: skip
    command.add_argument("--dtype", choices=DTYPES, help="of network and images (default: the network's own)")


def parser() -> argparse.ArgumentParser:
    """The command line: `torchtp info`, `torchtp plan`, `torchtp bench`, `torchtp trace`, `torchtp timeline`, `torchtp --version`."""
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
    command = commands.add_parser(
        "plan",
        help="what training a network on cut images would keep, send and gather; no device needed",
        description="Print, for each mesh, what one rank keeps for backward compared with a single device, what it sends "
        "a training step, and which ops have no rule and gather. Nothing is launched and no memory for images is needed. "
        "Exits with 2 if the network is not found or does not take such images.",
        epilog="example: torchtp plan torchvision.models:resnet50 --shape 1,3,2160,3840 --mesh w=4 --mesh h=2,w=2",
    )
    _take_network(command)
    command.add_argument("--eval", action="store_true", help="the network in evaluation mode, as for a frozen one")
    command.add_argument("--details", action="store_true", help="list every gather and what is wasteful, for each mesh")
    command.add_argument("--json", action="store_true", help="print every number as JSON instead of a table")
    command.set_defaults(run=_show_plan)
    command = commands.add_parser(
        "bench",
        help="what this machine does: calls beside gloo's, or training steps on a mesh beside one process",
        description="Without a network: time collectives and messages between processes of this machine, beside gloo. With one: time "
        "training steps (forward, backward, averaging) on random images, for each mesh, beside one process that has all cores, and compare the "
        "gradients. Medians of the slowest rank, both sides in turn in the same processes. On CPUs. Exits with 2 if the network is not found.",
        epilog="examples: torchtp bench --ranks 4;  torchtp bench torchvision.models:resnet50 --shape 2,3,512,512 --mesh w=2",
    )
    _take_network(command, optional=True)
    command.add_argument("--ranks", type=_positive, help="without a network: how many processes (default: 2)")
    command.add_argument(
        "--repeat", type=_positive, help="measurements of each figure (default: 20, of training steps 5)"
    )
    command.add_argument("--json", action="store_true", help="print every number as JSON instead of a table")
    command.set_defaults(run=_show_bench)
    command = commands.add_parser(
        "trace",
        help="where the ranks of a job part: merges the traces that they wrote down",
        description="Put the last calls of all ranks side by side, for each process group, and tell the first call on which "
        "they are not at one: who called something else, who has not called it, who has not come through; the same for exchanges of "
        "halos; and messages that found no partner. Traces are "
        "written by jobs with TORCHTP_TRACE=PATH, when a group fails or the job is ended by SIGTERM. Exits with 0 if all "
        "ranks agree, 1 if not or a rank's file is missing, 2 if a file is no trace. Ranks are those of the job, as in the files' names.",
        epilog="example: torchtp trace run7.rank*.jsonl",
    )
    command.add_argument("file", nargs="+", metavar="FILE", help="PATH.rank0.jsonl, PATH.rank1.jsonl, ...")
    command.set_defaults(run=_show_trace)
    command = commands.add_parser(
        "timeline",
        help="what the ranks of a job did when, as a picture: makes one of the traces that they wrote down",
        description="Write the last calls of all ranks as a timeline for a browser: for each rank and process group its collectives, with what "
        "was waited for which rank, its exchanges of halos and its messages. Traces are written by jobs with TORCHTP_TRACE=PATH, when a "
        "group fails or the job is ended by SIGTERM, and by torchtp.trace.dump(PATH). Clocks of several hosts are set by the calls that "
        "ranks have in common. Exits with 2 if a file is no trace.",
        epilog="example: torchtp timeline run7.rank*.jsonl --out run7.json",
    )
    command.add_argument("file", nargs="+", metavar="FILE", help="PATH.rank0.jsonl, PATH.rank1.jsonl, ...")
    command.add_argument(
        "--out", default="timeline.json", metavar="PATH", help="the file to write (default: %(default)s)"
    )
    command.set_defaults(run=_write_timeline)
    return root


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status (1: torchtp cannot be loaded here, 2: not understood or not possible)."""
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
