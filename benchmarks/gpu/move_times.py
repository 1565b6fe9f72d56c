"""How long what only moves numbers takes on a card: halos, buckets, and a plain copy of as many bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.part import no_program
from benchmarks.gpu.timing import Timer
from torchtp import _C

KERNELS = _C.kernels
FLAT_TYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def copies(timer: Timer, num_bytes: dict[str, float]) -> dict[str, float]:
    """Seconds of copying as many bytes, read and written together, that lie side by side: what a launch leaves of bandwidth."""

    def taken(count: int) -> float:
        def make() -> tuple[Tensor, Tensor]:
            return tuple(torch.randn(max(1, count // 8), device=timer.device) for _ in range(2))  # type: ignore[return-value]

        sets = timer.sets(make, count)
        return timer.seconds([lambda s=s: torch.mul(s[0], 1.0, out=s[1]) for s in sets])  # type: ignore[misc]

    return {name: taken(int(count)) for name, count in num_bytes.items()}


def halo_pack(timer: Timer, name: str, shape: tuple[int, ...], dim: int, depth: int) -> dict[str, Any]:
    """Both sides of a dim into one buffer, and back."""
    device = timer.device
    extent = shape[dim]
    starts, depths = (0, extent - depth), (depth, depth)
    x = torch.randn(shape, device=device).bfloat16()
    packed = torch.empty(2 * depth * x.numel() // extent, device=device, dtype=x.dtype)
    num_bytes = packed.numel() * packed.element_size()
    sets = timer.sets(lambda: (x.clone(), packed.clone()), 2 * num_bytes)

    def all_of(run: Callable[[Tensor, Tensor], Any]) -> float:
        return timer.seconds([lambda s=s: run(*s) for s in sets])  # type: ignore[misc]

    def narrowed(x: Tensor, packed: Tensor) -> None:
        halves = packed.view(2, -1)
        for side, start in enumerate(starts):
            slab = x.narrow(dim, start, depth)
            halves[side].view(slab.shape).copy_(slab)

    return {
        "kind": "halo pack",
        "what": name,
        "bytes": num_bytes,
        "moved": 2 * num_bytes,
        "ours": {
            "pack": all_of(lambda x, packed: KERNELS.halo_pack(x, packed, dim, starts, depths)),
            "unpack": all_of(lambda x, packed: KERNELS.halo_unpack(packed, x, dim, starts, depths)),
        },
        "theirs": {"narrow and copy": all_of(narrowed)},
        "copy": copies(timer, dict.fromkeys(("pack", "unpack"), 2 * num_bytes)),
    }


def bucket(timer: Timer, flat_kind: str) -> dict[str, Any]:
    """Gradients of ConvNeXt-XL's blocks of stage 3, as many as a bucket of 25 MiB and one of 200 MiB hold."""
    device, flat_type = timer.device, FLAT_TYPES[flat_kind]
    c = 8 if timer.dry else 1024
    block = [c * 49, c, c, c, 4 * c * c, 4 * c, 4 * c * c, c, c]
    counts = block * (1 if timer.dry else 6)
    numel = sum(counts)
    moved = numel * (4 + flat_type.itemsize)

    def make() -> tuple[list[Tensor], Tensor, list[Tensor]]:
        tensors = [torch.randn(count, device=device) for count in counts]
        flat = torch.empty(numel, device=device, dtype=flat_type)
        return tensors, flat, list(flat.split(counts))

    sets = timer.sets(make, moved)

    def taken(run: Callable[[tuple[list[Tensor], Tensor, list[Tensor]]], Any]) -> float:
        return timer.seconds([lambda s=s: run(s) for s in sets])  # type: ignore[misc]

    return {
        "kind": "bucket pack",
        "what": f"{len(counts)} fp32 tensors to {flat_kind}",
        "moved": moved,
        "ours": {
            "pack": taken(lambda s: KERNELS.bucket_pack(s[0], s[1], 0.5)),
            "unpack": taken(lambda s: KERNELS.bucket_unpack(s[1], s[0], 0.5)),
        },
        "theirs": {
            "pack": taken(lambda s: torch._foreach_copy_(s[2], s[0])),
            "unpack": taken(lambda s: torch._foreach_copy_(s[0], s[2])),
        },
        "clip": {
            "ours": taken(lambda s: KERNELS.bucket_clip(s[1], 1.0)),
            "theirs": taken(lambda s: torch.linalg.vector_norm(torch.stack(torch._foreach_norm(s[2])))),
            "bytes": numel * flat_type.itemsize,
        },
    }


if __name__ == "__main__":
    no_program(__doc__, "benchmarks.gpu.kernel_times")
