"""Networks of torchvision, timm and transformers on two and four ranks of one card, with PyTorch's step of each on the card beside them.

python -m benchmarks.gpu.networks [--dry-run]

In float64, where outputs and all gradients are those of one device; and in float32, the type that our kernels take, without kinks (smooth.py),
where a cut network may be no further from float64 than PyTorch's own step in float32, some rounding apart.
"""

from __future__ import annotations

import argparse
import math
import os
import warnings
from importlib import import_module
from typing import Any

import torch

import torchtp
from benchmarks.gpu import rank_bodies
from benchmarks.gpu.part import Part, main
from benchmarks.gpu.ranks import ONE_CARD, on_ranks
from benchmarks.gpu.smooth import Smooth
from benchmarks.library_networks import networks
from benchmarks.networks import Axes, compare_step, image_of, installed, layout_of, made, mesh_text, named, step
from torchtp.testing import timeout_scale

_LIBRARIES = ("torchvision", "timm", "transformers")
# Float32 on one device is off by so much of float64; a cut one may be off by so many times that.
_TIMES = 10.0
_ROUNDING = 1e-2  # of the largest gradient


def network(dry: bool, library: str, name: str, axes: Axes) -> dict[str, Any]:
    device = rank_bodies.start(dry)
    torch.use_deterministic_algorithms(False)  # torchvision has another way then, of many gigabytes
    found = named(library, name)
    image, layout = image_of(found).to(device), layout_of(axes, device)
    row: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one = made(found).to(device)
        expected, _ = step(one, image)
        cut = torchtp.parallelize(made(found).to(device), layout, output="full")
        outputs, _ = step(cut, image)
        row["float64"] = compare_step(cut, outputs, one, expected)
        del cut, outputs
        with Smooth():
            one = made(found).to(device)  # anew: a detector draws what it trains on
            expected, _ = step(one, image)
            plain = made(found).to(device).float()
            outputs, _ = step(plain, image.float())
            row["float32"] = compare_step(plain, outputs, one, expected, _ROUNDING)
            cut = torchtp.parallelize(made(found).to(device).float(), layout, output="full")
            outputs, _ = step(cut, image.float())
            row["cut_float32"] = compare_step(cut, outputs, one, expected, _ROUNDING)
    if not row["float64"] <= found.tolerance:
        raise AssertionError(f"off by {row['float64']:.1e} in float64")
    if not row["cut_float32"] <= _TIMES * max(row["float32"], 1e-6):
        raise AssertionError(
            f"off by {row['cut_float32']:.1e} in float32, where one device is off by {row['float32']:.1e}"
        )
    return row


def run(part: Part, options: argparse.Namespace) -> None:
    if not part.dry:
        os.environ.update(ONE_CARD)
    present = [each for each in networks() if each.library in _LIBRARIES and installed(each.library)]
    body = import_module("benchmarks.gpu.networks").network  # under a name that ranks can import, not __main__
    present.sort(key=lambda each: _LIBRARIES.index(each.library))
    meshes: tuple[Axes, ...] = ({"w": 2},) if part.dry else ({"h": 2, "w": 2}, {"w": 2})
    for axes in meshes:
        for each in present[: 1 if part.dry else None]:
            size = math.prod(axes.values())
            part.case(
                f"{each.library} {each.name}, {mesh_text(axes)}",
                lambda each=each, axes=axes, size=size: on_ranks(  # type: ignore[misc]
                    size, body, part.dry, each.library, each.name, axes, timeout=60.0
                ),
                seconds=75 * timeout_scale(),
            )


if __name__ == "__main__":
    main(__doc__, run)
