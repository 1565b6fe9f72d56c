"""Random numbers of a model whose images are cut: the single device's, each rank taking its own part.

The ranks that cut one image run a forward from the same generator states (those of the first of them, see `stream`), so
whatever is drawn whole, as DropPath's mask or a mixup's weight, is the same on all of them. Whatever is drawn for a cut tensor, as dropout's
mask, is drawn for the whole one and cut (see dtensor/random.py): exactly the single device's numbers, for the time and memory of
drawing them all. Where there are several data ranks, each derives its states from its own and its number, and all of them go on
alike afterwards: what a program that was seeded alike draws between forwards is the same everywhere.
Checkpointing keeps and restores the states of torch's generators as it always does.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
import torch.distributed as dist

from torchtp.layout import Layout
from torchtp.parallel.digest import bytes_of, digest

try:
    import numpy
    import numpy.random
except ImportError:  # PyTorch does without
    numpy = None  # type: ignore[assignment]


def fingerprint(layout: Layout) -> int:
    """63 bits that tell apart the states of the generators a forward draws from."""
    return digest(b"".join(generator.mark() for generator in _generators(layout)))


@contextmanager
def stream(layout: Layout, fingerprints: list[int]) -> Iterator[None]:
    """Run a forward from generator states that all ranks of the spatial group have.

    `fingerprints` are those of the ranks of the spatial group. Collective over it, where they differ. A generator whose own
    state was not used gets it back, moved on by one draw if the forward drew anything from it.
    """
    agreed = all(value == fingerprints[0] for value in fingerprints)
    if agreed and layout.num_data == 1:
        yield
        return
    generators = _generators(layout)
    own = [generator.state() for generator in generators]
    foreign = []
    for generator, mine, first in zip(generators, own, own if agreed else _of_the_first(own, layout), strict=True):
        if layout.num_data > 1:
            generator.seed(digest(repr((digest(first), layout.data_rank)).encode()))
        elif mine != first:
            generator.restore(first)
        else:  # goes on as the first rank's does
            continue
        foreign.append((generator, mine))
    marks = [generator.mark() for generator, _ in foreign]
    try:
        yield
    finally:
        for (generator, mine), mark in zip(foreign, marks, strict=True):
            drew = generator.mark() != mark
            generator.restore(mine)
            if drew:
                generator.draw()


class _Generator(Protocol):
    """What a forward may draw from; a state is as long on every rank. Its mark tells it apart, and is had at every call."""

    def mark(self) -> bytes: ...
    def state(self) -> bytes: ...
    def restore(self, state: bytes) -> None: ...
    def seed(self, seed: int) -> None: ...
    def draw(self) -> None: ...


class _Torch:
    """torch's, of one device."""

    def __init__(self, device: torch.device):
        self._device = device
        self._module: Any = torch if device.type == "cpu" else torch.get_device_module(device.type)
        self._which = () if device.type == "cpu" else (device,)

    def mark(self) -> bytes:
        return self.state()

    def state(self) -> bytes:
        return bytes_of(self._module.get_rng_state(*self._which))

    def restore(self, state: bytes) -> None:
        self._module.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8), *self._which)

    def seed(self, seed: int) -> None:
        self._module.manual_seed(seed)

    def draw(self) -> None:
        torch.rand((), device=self._device)


class _Python:
    """That of the module random."""

    _layout = struct.Struct("=625I?d")  # the words, and of two normal numbers the second one where it is still to come

    def mark(self) -> bytes:
        _, words, normal = random.getstate()
        return struct.pack("=q", hash((words, normal or 0.0)))  # of numbers, so the same in every process

    def state(self) -> bytes:
        _, words, normal = random.getstate()
        return self._layout.pack(*words, normal is not None, normal or 0.0)

    def restore(self, state: bytes) -> None:
        *words, has_normal, normal = self._layout.unpack(state)
        random.setstate((3, tuple(words), normal if has_normal else None))

    def seed(self, seed: int) -> None:
        random.seed(seed)

    def draw(self) -> None:
        random.random()


class _NumPy:
    """That of the functions in numpy.random."""

    _name = "MT19937"  # another one that was put in its place is left alone
    _layout = struct.Struct("=2496sQ?d")

    def mark(self) -> bytes:
        return self.state()  # a second normal number that is still to come stands nowhere else

    def state(self) -> bytes:
        state: Any = numpy.random.get_state(legacy=False)
        if state["bit_generator"] != self._name:
            return bytes(self._layout.size)
        inner, has_normal = state["state"], bool(state["has_gauss"])
        return self._layout.pack(inner["key"].tobytes(), inner["pos"], has_normal, state["gauss"])

    def restore(self, state: bytes) -> None:
        if not any(state):
            return
        words, position, has_normal, normal = self._layout.unpack(state)
        key = numpy.frombuffer(words, dtype=numpy.uint32)
        numpy.random.set_state((self._name, key, position, int(has_normal), normal))

    def seed(self, seed: int) -> None:
        if any(self.state()):
            numpy.random.seed(seed % (1 << 32))

    def draw(self) -> None:
        numpy.random.random()


def _generators(layout: Layout) -> list[_Generator]:
    devices = {"cpu": torch.device("cpu"), layout.mesh.device_type: layout.device}
    return [*map(_Torch, devices.values()), *outside_torch()]


def outside_torch() -> list[_Generator]:
    """Those of Python and NumPy."""
    return [_Python()] if numpy is None else [_Python(), _NumPy()]


def _of_the_first(own: list[bytes], layout: Layout) -> list[bytes]:
    """The states that the first rank of the spatial group has."""
    group = layout.spatial_group
    message = torch.frombuffer(bytearray(b"".join(own)), dtype=torch.uint8)
    if torch.device("cpu") not in group._device_types:
        message = message.to(layout.device)
    dist.broadcast(message, dist.get_global_rank(group, 0), group=group)
    states = bytes_of(message.cpu())
    return [states[begin:end] for begin, end in pairwise(accumulate(map(len, own), initial=0))]
