"""What the tests of spatial ops share: meshes, cutting a tensor, random layouts, comparing."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchtp import _C


@functools.cache
def _mesh(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape)


@dataclass(frozen=True)
class Sharding:
    """Tensor dims cut over the axes of a mesh of all ranks, as DTensor's Shard cuts them."""

    shape: tuple[int, ...]
    dims: tuple[int, ...]

    @property
    def groups(self) -> list[str]:
        return [_mesh(self.shape).get_group(axis).group_name for axis in range(len(self.shape))]

    def cut(self, full: torch.Tensor) -> tuple[list[int], list[int], list[str]]:
        """The lists cut_dims, cut_extents, cut_groups of an op whose unsharded input is `full`."""
        return list(self.dims), [full.shape[dim] for dim in self.dims], self.groups

    def shard(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's part, a leaf of its own in the layout of `full`; it requires grad if `full` does."""
        part = full.detach()
        for axis, dim in enumerate(self.dims):
            each = -(-full.shape[dim] // self.shape[axis])
            begin = min(full.shape[dim], _mesh(self.shape).get_local_rank(axis) * each)
            part = part.narrow(dim, begin, min(full.shape[dim], begin + each) - begin)
        return part.clone(memory_format=layout_of(full)).requires_grad_(full.requires_grad)


def shardings(dims: Sequence[int], data: bool = False) -> list[Sharding]:
    """Ways to cut `dims` (or some of them) over all ranks; with `data`, dim 0 too."""
    size = dist.get_world_size()
    out = [Sharding((size,), (dim,)) for dim in dims]
    if size == 4:
        out += [Sharding((2, 2), (a, b)) for a in dims for b in dims if a < b]
        if data:
            out += [Sharding((2, 2), (0, dim)) for dim in dims]
    return out


@contextmanager
def left_where_they_arrive(ways: Sequence[Sharding]) -> Iterator[None]:
    """Halos of these travel through memory that ranks share, as a device's do, if the ranks are torchtp's."""
    groups = {group for way in ways for group in way.groups} if dist.get_backend() == "torchtp" else ()
    for group in groups:
        _C.set_exchange(group, "peer_memory")
    try:
        yield
    finally:
        for group in groups:
            _C.set_exchange(group, "auto")


def layout_of(tensor: torch.Tensor) -> torch.memory_format:
    if not tensor.is_contiguous():
        for layout in (torch.channels_last, torch.channels_last_3d):
            if tensor.dim() == (4 if layout is torch.channels_last else 5) and tensor.is_contiguous(
                memory_format=layout
            ):
                return layout
    return torch.contiguous_format


def random_layout(rng: random.Random, num_dims: int) -> torch.memory_format:
    """Contiguous or, where there is one, channels_last."""
    layouts = {4: torch.channels_last, 5: torch.channels_last_3d}
    return rng.choice([torch.contiguous_format, layouts.get(num_dims, torch.contiguous_format)])


def total(part: torch.Tensor) -> torch.Tensor:
    """The sum over all ranks."""
    part = part.detach().clone()
    dist.all_reduce(part)
    return part


def assert_same(actual: torch.Tensor, expected: torch.Tensor, what: object, tolerance: float = 1e-10) -> None:
    """Shape, dtype and values: the largest difference relative to the largest value; 0 means bit for bit."""
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype}, not {expected.dtype}"
    if tolerance == 0:
        assert torch.equal(actual, expected), f"{what}: differs\n{actual}\n{expected}"
        return
    if actual.numel() == 0:
        return
    error = (actual - expected).abs().max() / expected.abs().max().clamp(min=1e-3)
    assert error <= tolerance, f"{what}: relative error {error:.1e}"


def draw_convolution(rng: random.Random, dims: int, transposed: bool) -> tuple[list[int], ...]:
    """Extents, kernel, stride, padding, dilation, output_padding of a convolution with an output."""
    while True:
        extents = [rng.randint(1, (40, 12, 7)[dims - 1]) for _ in range(dims)]
        kernel = [rng.randint(1, (8, 5, 3)[dims - 1]) for _ in range(dims)]
        stride = [rng.randint(1, 4) for _ in range(dims)]
        padding = [rng.randint(0, (9, 4, 3)[dims - 1]) for _ in range(dims)]
        dilation = [rng.randint(1, 3) for _ in range(dims)]
        extra = [rng.randint(0, max(s, d) - 1) if transposed else 0 for s, d in zip(stride, dilation, strict=True)]
        reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        numbers = list(zip(extents, stride, padding, reach, extra, strict=True))
        if transposed and all((L - 1) * s - 2 * p + r + e + 1 > 0 for L, s, p, r, e in numbers):
            return extents, kernel, stride, padding, dilation, extra
        if not transposed and all(L + 2 * p > r for L, _, p, r, _ in numbers):
            return extents, kernel, stride, padding, dilation, extra


def leaf(tensor: torch.Tensor | None) -> Any:
    return None if tensor is None else tensor.detach().clone().requires_grad_()
