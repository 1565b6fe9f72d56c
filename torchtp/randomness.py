"""Random numbers of a model whose images are cut: the single device's, each rank taking its own part.

The ranks that cut one image run a forward from the same generator state (that of the first of them, see `Stream`), so
whatever is drawn whole, as DropPath's mask, is the same on all of them. Whatever is drawn for a cut tensor, as dropout's
mask, is drawn for the whole one and cut (see dtensor/randomness.py): exactly the single device's numbers, for the time and memory of
drawing them all. Data rank 0 uses its own generators, as a single device would; the other data ranks derive theirs.
Checkpointing keeps and restores the generators' states as it always does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from torchtp.agreement import digest
from torchtp.layout import Layout


def fingerprint(layout: Layout) -> int:
    """63 bits that tell apart the states of the generators a forward draws from."""
    return digest(b"".join(state.numpy().tobytes() for state in _states(layout)))


@contextmanager
def stream(layout: Layout, fingerprints: list[int]) -> Iterator[None]:
    """Run a forward from a generator state that all ranks of the spatial group have.

    `fingerprints` are those of the ranks of the spatial group. Collective over it, where they differ. A rank whose own
    state was not used gets it back, moved on by one draw if the forward drew anything.
    """
    agreed = all(value == fingerprints[0] for value in fingerprints)
    if agreed and layout.data_rank == 0:
        yield
        return
    own = _states(layout)
    keeps = layout.data_rank == 0 and layout.spatial_rank == 0
    if layout.data_rank > 0:
        torch.manual_seed(digest(repr((fingerprints[0], layout.data_rank)).encode()))
    states = _states(layout)
    if layout.data_rank == 0:
        for state in states:
            _broadcast(state, layout)
        _restore(layout, states)
    try:
        yield
    finally:
        drew = any(not torch.equal(before, after) for before, after in zip(states, _states(layout), strict=True))
        if not keeps:
            _restore(layout, own)
            if drew:
                for device in _devices(layout):
                    torch.rand((), device=device)


def _devices(layout: Layout) -> list[torch.device]:
    cpu = torch.device("cpu")
    return [cpu] if layout.mesh.device_type == "cpu" else [cpu, layout.device]


def _states(layout: Layout) -> list[torch.Tensor]:
    accelerator = torch.get_device_module(layout.mesh.device_type)
    return [
        torch.get_rng_state() if device.type == "cpu" else accelerator.get_rng_state(device)
        for device in _devices(layout)
    ]


def _restore(layout: Layout, states: list[torch.Tensor]) -> None:
    accelerator = torch.get_device_module(layout.mesh.device_type)
    for device, state in zip(_devices(layout), states, strict=True):
        if device.type == "cpu":
            torch.set_rng_state(state)
        else:
            accelerator.set_rng_state(state, device)


def _broadcast(state: torch.Tensor, layout: Layout) -> None:
    group = layout.spatial_group
    source = dist.get_global_rank(group, 0)
    if torch.device("cpu") in group._device_types:
        dist.broadcast(state, source, group=group)
    else:
        moved = state.to(layout.device)
        dist.broadcast(moved, source, group=group)
        state.copy_(moved)
