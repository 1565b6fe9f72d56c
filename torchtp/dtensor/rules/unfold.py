"""F.unfold and F.fold of cut DTensors: a rank's patches from the rows it has and a halo; adjoints of each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from torchtp.dtensor.cut import Placements
from torchtp.dtensor.moving import Wants, chunk_of, pulled, pushed
from torchtp.dtensor.registry import bound, spatial_rule
from torchtp.dtensor.rules.fallback import unruled
from torchtp.dtensor.rules.shape import axis_cutting, summed, taken
from torchtp.dtensor.sharing import local_as
from torchtp.dtensor.upstream import DeviceMesh, DTensor, Op, Replicate, Shard, plain_shard
from torchtp.dtensor.wrapping import wrap, wrap_in_format

aten = torch.ops.aten


@dataclass(frozen=True)
class _Along:
    """The patches along one image dim."""

    extent: int  # of the image
    kernel: int
    dilation: int
    padding: int
    stride: int

    @property
    def reach(self) -> int:
        return (self.kernel - 1) * self.dilation + 1

    @property
    def count(self) -> int:
        return (self.extent + 2 * self.padding - self.reach) // self.stride + 1

    def rows(self, count: int) -> int:
        """That so many patches cover."""
        return (count - 1) * self.stride + self.reach

    @property
    def wants(self) -> Wants:
        first = self.padding
        return lambda o0, o1: (o0 * self.stride - first, (o1 - 1) * self.stride - first + self.reach)


def _alongs(sizes: list[int], params: list[list[int]]) -> list[_Along]:
    kernel, dilation, padding, stride = params
    if min(*kernel, *dilation, *stride) <= 0 or min(padding) < 0:
        raise ValueError(
            "unfold and fold: kernel size, dilation and stride must be positive and padding not negative, got "
            f"{kernel}, {dilation}, {stride} and {padding}"
        )
    return [_Along(*values) for values in zip(sizes, *params, strict=True)]


def _counts(mesh: DeviceMesh, placements: Placements, alongs: list[_Along]) -> list[int]:
    """The patches of this rank along each image dim."""
    counts = []
    for dim, along in enumerate(alongs, 2):
        axis = axis_cutting(placements, dim)
        begin, end = (0, along.count) if axis is None else chunk_of(mesh, axis, along.count)
        counts.append(end - begin)
    return counts


def _local_params(placements: Placements, alongs: list[_Along]) -> tuple[list[int], ...]:
    """Kernel, dilation, padding and stride for a rank: what lies beside the image along a cut dim was pulled as zeros."""
    cut = [axis_cutting(placements, dim) is not None for dim in (2, 3)]
    return (
        [along.kernel for along in alongs],
        [along.dilation for along in alongs],
        [0 if is_cut else along.padding for is_cut, along in zip(cut, alongs, strict=True)],
        [along.stride for along in alongs],
    )


def _is_image_cut(tensor: DTensor) -> bool:
    return any(axis_cutting(tensor.placements, dim) is not None for dim in (2, 3))


@spatial_rule("im2col")
def unfold(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    input, *params = bound(op, args, kwargs)
    if not taken(input) or input.dim() != 4:
        return unruled(op, args, kwargs)
    input = _by_place(input)
    if not _is_image_cut(input):
        return unruled(op, args, kwargs)
    local, mesh, placements = summed(input)
    alongs = _alongs(list(input.shape[2:]), params)
    if min(along.count for along in alongs) < 1:
        raise RuntimeError(f"unfold: the window does not fit into images of {list(input.shape[2:])}")
    for dim, along in enumerate(alongs, 2):
        axis = axis_cutting(placements, dim)
        if axis is not None:
            local = pulled(local, mesh, axis, dim, along.extent, along.count, along.wants)
    counts = _counts(mesh, placements, alongs)
    columns = input.size(1) * alongs[0].kernel * alongs[1].kernel
    own = [local.size(0), columns, *counts]
    patches = op(local, *_local_params(placements, alongs)).view(own) if 0 not in own else local.new_zeros(own)
    shape = torch.Size([input.size(0), columns, *(along.count for along in alongs)])
    return aten.view(wrap_in_format(patches, mesh, placements, shape), [*shape[:2], shape[2] * shape[3]])


@spatial_rule("col2im")
def fold(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    input, sizes, *params = bound(op, args, kwargs)
    if not taken(input) or input.dim() != 3:
        return unruled(op, args, kwargs)
    alongs = _alongs(list(sizes), params)
    patches = _by_place(aten.view(input, [*input.shape[:2], *(along.count for along in alongs)]))
    return _folded(op, patches, alongs) if _is_image_cut(patches) else unruled(op, args, kwargs)


def _by_place(image: DTensor) -> DTensor:
    """With all channels of a place on one rank: axes that cut them cut an image dim which no other axis does."""
    mesh, placements = image.device_mesh, image.placements
    if axis_cutting(placements, 1) is None:
        return image
    free = [dim for dim in (2, 3) if axis_cutting(placements, dim) is None]
    moved = []
    for placement in placements:
        if plain_shard(placement) and placement.dim == 1:
            placement = Shard(free.pop(0)) if free else Replicate()
        moved.append(placement)
    return wrap(local_as(image, mesh, tuple(moved)), mesh, tuple(moved), image.shape)


def _folded(op: Op, patches: DTensor, alongs: list[_Along]) -> DTensor:
    local, mesh, placements = summed(patches)
    channels = patches.size(1) // (alongs[0].kernel * alongs[1].kernel)
    counts = _counts(mesh, placements, alongs)
    rows = []
    for dim, (along, count) in enumerate(zip(alongs, counts, strict=True), 2):
        whole = axis_cutting(placements, dim) is None
        rows.append(along.extent if whole else along.rows(count) if count else 0)
    shape = [local.size(0), channels, *rows]
    if 0 in shape or 0 in counts:
        image = local.new_zeros(shape)
    else:
        image = op(local.flatten(2), rows, *_local_params(placements, alongs))
    for dim, along in reversed(list(enumerate(alongs, 2))):
        axis = axis_cutting(placements, dim)
        if axis is not None:
            image = pushed(image, mesh, axis, dim, along.extent, along.count, along.wants)
    return wrap(image, mesh, placements, torch.Size([patches.size(0), channels, *(along.extent for along in alongs)]))
