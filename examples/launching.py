"""What the examples share: the process group, the mesh of --mesh, tables."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import torchtp


def start_process_group(backend: str) -> None:
    """Joins the ranks that torchrun started; a plain `python` is a group of one."""
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())


def make_layout(mesh_flag: str | None, device: str = "cpu") -> torchtp.Layout:
    """The mesh of --mesh as a Layout; a spatial axis of size 1 is an axis too."""
    world = dist.get_world_size()
    sizes = {"w": world}
    if mesh_flag:
        sizes = {name: int(size) for name, _, size in (part.partition("=") for part in mesh_flag.split(","))}
        unknown = set(sizes) - {"data", "h", "w"}
        if unknown:
            sys.exit(f"--mesh {mesh_flag}: unknown axis {sorted(unknown)[0]!r}; the axes are data, h and w")
        if torch.Size(sizes.values()).numel() != world:
            sys.exit(f"--mesh {mesh_flag} needs {torch.Size(sizes.values()).numel()} ranks, but there are {world}")
    sizes = {name: sizes[name] for name in ("data", "h", "w") if name in sizes}
    if not sizes.keys() & {"h", "w"}:
        sizes["w"] = 1
    mesh = init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    spatial = {name: dim for name, dim in (("h", -2), ("w", -1)) if name in sizes}
    return torchtp.Layout(mesh, spatial=spatial, data="data" if "data" in sizes else None)


def spatial_groups(layout: torchtp.Layout | None) -> list[str]:
    """Names of the process groups over which images are cut."""
    if layout is None:
        return []
    mesh = layout.spatial_mesh
    return [mesh.get_group(axis).group_name for axis in range(mesh.ndim)]


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Prints rows of cells, right-aligned; the first row is the heading."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for number, row in enumerate(rows):
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
        if number == 0:
            print("  ".join("-" * width for width in widths))


def median(values: Sequence[float]) -> float:
    """The upper median."""
    return sorted(values)[len(values) // 2]
