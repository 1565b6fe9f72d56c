"""Networks of other libraries, cut, against the same on one device: outputs and all gradients, in float64.

    python -m benchmarks.networks                     # those of every library that is installed
    python -m benchmarks.networks monai "UNet, mit"   # whose library or name has one of these in it
    python -m benchmarks.networks --mesh h=3 --mesh h=2,w=2
    python -m benchmarks.networks --losses            # detectors and segmenters with their own losses
    python -m benchmarks.networks --families          # a small one of each architecture of timm

Nothing is timed. `error` is the largest difference of an output or a gradient, as a share of the largest number in it (of a gradient: at
least 1e-4 of the largest gradient, for some are nothing but rounding). `kept` is what autograd keeps for backward on the fullest rank, the image among it, as a
share of one device's: where it is much more than one by the number of ranks the network went on whole somewhere. What is gathered is told
with its bytes, on each rank.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import math
import sys
import warnings
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils import _pytree as pytree
from tqdm import tqdm

import torchtp
from benchmarks.common import RESULTS, parser, report
from benchmarks.library_losses import networks_with_losses
from benchmarks.library_networks import Network, networks, timm_families, timm_network
from torchtp.dtensor.notice import told_to
from torchtp.planning.measure import SavedBytes
from torchtp.testing import run_ranks

Row = dict[str, Any]
Axes = dict[str, int]

_DIMS = {"d": -3, "h": -2, "w": -1}


def made(network: Network) -> nn.Module:
    """The same on every rank, in float64; without what is random in training."""
    torch.manual_seed(0)
    module = network.build().double().train()
    for parameter in module.parameters():
        parameter.data = parameter.data.cdouble() if parameter.is_complex() else parameter.data
    for part in module.modules():
        if type(part).__name__ == "DropPath":
            part.drop_prob = 0.0
        elif isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = 0.0
    return module


def _tensors(outputs: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves(outputs)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def image_of(network: Network) -> Tensor:
    return torch.rand(network.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def named(library: str, name: str) -> Network:
    known = (each for each in (*networks(), *networks_with_losses()) if (each.library, each.name) == (library, name))
    return next(known, None) or timm_network(name)


def mesh_text(axes: Axes) -> str:
    """As --mesh takes it."""
    return ",".join(f"{name}={number}" for name, number in axes.items())


def layout_of(axes: Axes, device: torch.device) -> torchtp.Layout:
    mesh = init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    return torchtp.Layout(mesh, {name: _DIMS[name] for name in axes})


def step(module: nn.Module, image: Tensor) -> tuple[list[Tensor], int]:
    """The outputs and the bytes kept for backward; afterwards the parameters have the gradients of a weighted sum of all of them."""
    with SavedBytes(exclude=module.parameters()) as saved:
        outputs = _tensors(module(image))
    kept = saved.num_bytes
    total = torch.zeros((), dtype=torch.float64, device=image.device)
    for number, output in enumerate(output for output in outputs if output.requires_grad):
        generator = torch.Generator().manual_seed(number)
        weight = torch.rand(output.shape, generator=generator, dtype=torch.float64).to(output)
        total = total + (output * weight).sum() / output.numel() ** 0.5
    total.backward()
    return outputs, kept


def error_of(mine: Tensor, reference: Tensor, least: float = 0.0) -> float:
    """The largest difference over the largest number of the reference, which counts as `least` if it is less."""
    if mine.shape != reference.shape:
        return float("inf")
    if not reference.numel():
        return 0.0
    scale = max(reference.abs().max().item(), least)  # NaN stays
    return (mine - reference).abs().max().item() / scale if scale else 0.0


def compare_step(
    cut: nn.Module, outputs: list[Tensor], one: nn.Module, expected: list[Tensor], rounding: float = 1e-4
) -> float:
    """The largest error of outputs and gradients; AssertionError if one side has some that the other has not.

    A gradient below `rounding` of the largest one may be nothing but rounding, and counts as if it were that large.
    """
    if len(outputs) != len(expected):
        raise AssertionError(f"{len(outputs)} outputs, not {len(expected)}")
    errors = [error_of(mine.detach(), reference.detach()) for mine, reference in zip(outputs, expected, strict=True)]
    references = {name: p.grad for name, p in one.named_parameters() if p.grad is not None}
    least = rounding * max((grad.abs().max().item() for grad in references.values() if grad.numel()), default=0.0)
    for name, parameter in cut.named_parameters():
        if (parameter.grad is None) != (name not in references):
            raise AssertionError(f"{name} has a gradient on one side only")
        if parameter.grad is not None:
            errors.append(error_of(parameter.grad, references[name], least))
    return max(errors, key=_nan_last)


def _nan_last(error: float) -> tuple[bool, float]:
    """By what errors are sorted: Python's max passes over NaN."""
    return math.isnan(error), error


def _compare(network: Network, axes: Axes) -> Row:
    image = image_of(network)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one = made(network)
        expected, kept_by_one = step(one, image.clone())  # some networks write into their image
        layout = layout_of(axes, torch.device("cpu"))
        gathered: list[int] = []
        with told_to(lambda op, shape, dtype: gathered.append(shape.numel() * dtype.itemsize)):
            cut = torchtp.parallelize(made(network), layout, output="full")
            outputs, kept = step(cut, image)
    return {
        "error": compare_step(cut, outputs, one, expected),
        "kept_share": kept / kept_by_one,
        "gathers": len(gathered),
        "gathered_bytes": sum(gathered),
    }


def compare(library: str, name: str, axes: Axes) -> Row:
    """On every rank of a group; what goes wrong is in the row."""
    network = named(library, name)
    try:
        return _compare(network, axes)
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
        return {"error": float("inf"), "kept_share": 1.0, "gathers": 0, "gathered_bytes": 0, "failure": failure}


def installed(library: str) -> str | None:
    """Its version."""
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def _axes(text: str) -> Axes:
    parts = [part.partition("=") for part in text.split(",")]
    if not all(name in _DIMS and size.isdecimal() and int(size) for name, _, size in parts):
        raise argparse.ArgumentTypeError(f"a mesh is written like h=2,w=2, of the axes d, h and w, not {text!r}")
    return {name: int(size) for name, _, size in parts}


def main() -> int:
    flags = parser(__doc__, times=False)
    flags.add_argument("wanted", nargs="*", metavar="NAME", help="part of a library's or a network's name")
    flags.add_argument("--mesh", action="append", type=_axes, help="default: h=2, h=3, w=2 and h=2,w=2")
    sets = flags.add_mutually_exclusive_group()
    sets.add_argument("--losses", action="store_true", help="detectors and segmenters with their own losses")
    sets.add_argument("--families", action="store_true", help="of timm's architectures, one of each")
    args = flags.parse_args()
    known, result = networks, None
    if args.losses:
        known, result = networks_with_losses, RESULTS / "network_losses.json"
    elif args.families:
        known, result = timm_families, RESULTS / "families.json"
    meshes = args.mesh or [{"h": 2}, {"h": 3}, {"w": 2}, {"h": 2, "w": 2}]
    chosen = [
        each
        for each in known()
        if not args.wanted or any(part in f"{each.library} {each.name}" for part in args.wanted)
    ]
    versions = {library: installed(library) for library in dict.fromkeys(each.library for each in chosen)}
    present = [each for each in chosen if versions[each.library] is not None]
    if not present:
        flags.error(f"nothing to compare: not installed are {', '.join(versions) or 'networks of that name'}")
    if args.quick:
        present, meshes = present[:2], meshes[:1]
    on_ranks = import_module("benchmarks.networks").compare  # under a name that ranks can import, not __main__
    rows: list[Row] = []
    for network, axes in tqdm([(network, axes) for network in present for axes in meshes], unit="network"):
        found = run_ranks(
            on_ranks,
            math.prod(axes.values()),
            network.library,
            network.name,
            axes,
            backend="torchtp",
            timeout=300.0,
            fresh=True,  # what the heaps of three meshes' workers grow to after hundreds of networks is more than 24 GB
        )
        worst = max(found, key=lambda row: _nan_last(row["error"]))
        worst["kept_share"] = max(row["kept_share"] for row in found)
        rows.append(
            {
                "library": network.library,
                "network": network.name,
                "shape": list(network.shape),
                "mesh": mesh_text(axes),
                "tolerance": network.tolerance,
                **worst,
            }
        )
    report(
        "networks",
        rows,
        {
            "library": lambda row: row["library"],
            "network": lambda row: row["network"],
            "shape": lambda row: "x".join(map(str, row["shape"])),
            "mesh": lambda row: row["mesh"],
            "error": lambda row: row.get("failure", f"{row['error']:.0e}")[:80],
            "kept": lambda row: f"{row['kept_share']:.2f}",
            "gathers": lambda row: f"{row['gathers']} ({row['gathered_bytes'] / 2**20:.1f} MiB)" if row["gathers"] else "-",
        },
        args.out or result,
        {"versions": versions, "not installed": [library for library, found in versions.items() if found is None]},
    )  # fmt: skip
    return int(any(not row["error"] <= row["tolerance"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
